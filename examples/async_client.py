"""The asyncio client: several answers at once, one of them cancelled. `python examples/async_client.py ADDRESS [MODEL]`."""

import asyncio
import os
import sys

from kvmesh.client import AsyncClient, ClientSettings, SamplingParams


async def first_words(client: AsyncClient, model: str, prompt: str) -> str:
    """Leaving the stream stops the request on the mesh."""
    words = ""
    async with client.generate_stream(model, prompt, sampling=SamplingParams(max_tokens=500)) as stream:
        async for piece in stream:
            words += piece.text
            if len(words) > 40:
                break
    return words


async def main() -> None:
    """Asks all at once."""
    address, model = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "demo"
    async with AsyncClient(address, ClientSettings(api_key=os.environ.get("KVMESH_API_KEY", ""))) as client:
        whole = client.generate(model, "One, two,", sampling=SamplingParams(max_tokens=8, seed=1))
        answer, *begun = await asyncio.gather(whole, *(first_words(client, model, f"Story {i}:") for i in range(3)))
        print("whole:", answer.text)
        for words in begun:
            print("begun:", words)


if __name__ == "__main__":
    asyncio.run(main())
