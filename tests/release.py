"""The contracts of the last release, read from the committed image. Simulates a process of that release by removing unknown fields.

An older commit cannot replace the release: only compatibility with this image is checked, by `buf breaking`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

IMAGE = Path(__file__).resolve().parents[1] / "protos" / "contracts.binpb"


class Release:
    """Message types and methods by name."""

    def __init__(self) -> None:
        files = descriptor_pb2.FileDescriptorSet.FromString(IMAGE.read_bytes())
        self._pool = descriptor_pool.DescriptorPool()
        self.methods: dict[str, tuple[str, str]] = {}
        """Full names of request and response, by the method's path."""
        self.messages: list[str] = []
        for file in files.file:
            self._pool.Add(file)
            self.messages += [f"{file.package}.{each.name}" for each in file.message_type]
            for service in file.service:
                for method in service.method:
                    path = f"/{file.package}.{service.name}/{method.name}"
                    self.methods[path] = method.input_type.lstrip("."), method.output_type.lstrip(".")

    def type_of(self, name: str) -> type[Message]:
        """Returns the class of a message, as defined in the release."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))

    def known_part(self, name: str, data: bytes) -> bytes:
        """Returns the message without the fields that the release does not define."""
        message = self.type_of(name).FromString(data)
        message.DiscardUnknownFields()  # type: ignore[no-untyped-call]
        return message.SerializeToString()

    def wrap(self, channel: Any) -> Any:
        """Returns a channel to or from a process of the release: it removes all fields that the release does not define."""
        return _ReleaseChannel(self, channel)


class _ReleaseChannel:
    """Removes unknown fields from the messages of known methods and delegates everything else to the channel."""

    def __init__(self, release: Release, channel: Any) -> None:
        self._release = release
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        return self._calls(found) if name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream") else found

    async def __aenter__(self) -> "_ReleaseChannel":
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *arguments: Any) -> None:
        await self._channel.__aexit__(*arguments)

    def _calls(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def make_call(path: str, request_serializer: Any = None, response_deserializer: Any = None, **more: Any) -> Any:
            known = self._release.methods.get(path)
            if known is None:
                return make(path, request_serializer, response_deserializer, **more)
            asked, answered = known
            return make(
                path,
                lambda message: self._release.known_part(asked, request_serializer(message)),
                lambda data: response_deserializer(self._release.known_part(answered, data)),
                **more,
            )

        return make_call
