"""The asyncio client: several concurrent answers. The client closes three streams early, which cancels their requests in the mesh.

.venv/bin/python examples/async_client.py [ADDRESS [MODEL]]
"""

import asyncio
import os
import sys

from kvmesh.client import AsyncClient, ClientSettings, SamplingParams


async def first_words(client: AsyncClient, model: str, prompt: str) -> str:
    """Returns the beginning of an answer. Closing the stream cancels the request in the mesh."""
    words = ""
    async with client.generate_stream(model, prompt, sampling=SamplingParams(max_tokens=500)) as stream:
        async for piece in stream:
            words += piece.text
            if len(words) > 60:
                break
    return prompt + words


async def main() -> None:
    """Sends all requests at once."""
    address, model = [*sys.argv[1:], *("127.0.0.1:50051", "demo")[len(sys.argv) - 1 :]][:2]
    async with AsyncClient(address, ClientSettings(api_key=os.environ.get("KVMESH_API_KEY", ""))) as client:
        question = [{"role": "user", "content": "Hello! Who are you?"}]
        whole = client.chat(model, question, sampling=SamplingParams(max_tokens=64))
        stories = (
            first_words(client, model, f"Once upon a time there was a {animal}")
            for animal in ("cat", "rabbit", "horse")
        )
        answer, *begun = await asyncio.gather(whole, *stories)
        print("whole:", answer.text)
        for words in begun:
            print("begun:", words)


if __name__ == "__main__":
    asyncio.run(main())
