"""The Python client: models, an answer in pieces, a tool call's arguments, a batch, tokens. `python examples/client.py ADDRESS [MODEL]`.

An API key is taken from KVMESH_API_KEY.
"""

import os
import sys

from kvmesh.client import Client, ClientSettings, SamplingParams
from kvmesh.errors import MeshError

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main() -> int:
    """Asks, and says what went wrong in one line."""
    address, model = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "demo"
    settings = ClientSettings(api_key=os.environ.get("KVMESH_API_KEY", ""), timeout_s=60.0)
    with Client(address, settings) as client:
        try:
            talk(client, model)
        except MeshError as error:
            print(f"{error.reason}: {error.message}", file=sys.stderr)
            return 1
    return 0


def talk(client: Client, model: str) -> None:
    """A few calls."""
    print("models:", ", ".join(each.name for each in client.models()))
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    with client.chat_stream(model, question, sampling=SamplingParams(max_tokens=24)) as stream:
        for piece in stream:
            print(piece.text, end="", flush=True)
            if piece.usage is not None:
                print(f"\nusage: {piece.usage.prompt_tokens} in, {piece.usage.output_tokens} out")
    answer = client.chat(model, question, tools=[WEATHER], tool_choice="get_weather")
    for call in answer.choices[0].tool_calls:
        print("call:", call.name, call.arguments)
    ask_later(client, model)
    token_ids = client.tokenize(model, "Hello, mesh")
    print("tokens:", token_ids, "->", client.detokenize(model, token_ids))


def ask_later(client: Client, model: str) -> None:
    """Many requests at once, answered when the mesh has room."""
    questions = {f"q{i}": {"model": model, "prompt": f"Story {i}:", "max_tokens": 8} for i in range(3)}
    batch = client.batches.wait(client.batches.create("/v1/completions", questions).id)
    with client.batches.results(batch.id) as answers:
        for answer in answers:
            print("batch:", answer.custom_id, answer.status_code)


if __name__ == "__main__":
    sys.exit(main())
