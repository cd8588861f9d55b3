"""The blocking Python client: models, a streamed answer, a tool call, a batch, tokens.

    .venv/bin/python examples/client.py [ADDRESS [MODEL]]

Sends the API key in KVMESH_API_KEY, if it is set.
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
    """Runs the calls. Prints a failure in one line."""
    address, model = [*sys.argv[1:], *("127.0.0.1:50051", "demo")[len(sys.argv) - 1 :]][:2]
    settings = ClientSettings(api_key=os.environ.get("KVMESH_API_KEY", ""), timeout_s=60.0)
    with Client(address, settings) as client:
        try:
            talk(client, model)
        except MeshError as error:
            print(f"{error.reason}: {error.message}", file=sys.stderr)
            return 1
    return 0


def talk(client: Client, model: str) -> None:
    """Makes a few calls."""
    print("models:", ", ".join(each.name for each in client.models()))
    question = [{"role": "user", "content": "Hello! Who are you?"}]
    print("answer: ", end="")
    with client.chat_stream(model, question, sampling=SamplingParams(max_tokens=24)) as stream:
        for piece in stream:
            print(piece.text, end="", flush=True)
            if piece.usage is not None:
                print(f"\nusage: {piece.usage.prompt_tokens} tokens in, {piece.usage.output_tokens} out")
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat(model, question, tools=[WEATHER], tool_choice="get_weather")
    for call in answer.choices[0].tool_calls:
        print("tool call:", call.name, call.arguments)
    ask_later(client, model)
    token_ids = client.tokenize(model, "Hello, mesh")
    print("tokens:", token_ids, "->", client.detokenize(model, token_ids))


def ask_later(client: Client, model: str) -> None:
    """Sends a batch: many requests at once, which the mesh answers when it has capacity."""
    animals = ("cat", "rabbit", "horse")
    questions = {
        animal: {"model": model, "prompt": f"Once upon a time there was a {animal}", "max_tokens": 16, "seed": 1}
        for animal in animals
    }
    batch = client.batches.wait(client.batches.create("/v1/completions", questions).id)
    with client.batches.results(batch.id) as answers:
        for answer in answers:
            print(f"batch: {answer.custom_id} {answer.status_code}: ...{answer.body['choices'][0]['text']}")


if __name__ == "__main__":
    sys.exit(main())
