"""Renders conversations with transformers, in a separate process because importing it takes seconds. Reads and writes JSON lines.

Each input line holds a template's source, special tokens, messages, tools, documents, arguments and add_generation_prompt. The output line is
the text, or null if the template raises an error.
"""

import json
import sys

from transformers.utils.chat_template_utils import render_jinja_template


def main() -> None:
    for line in sys.stdin:
        case = json.loads(line)
        try:
            (text,), _ = render_jinja_template(
                conversations=[case["messages"]],
                tools=case["tools"],
                documents=case["documents"],
                chat_template=case["source"],
                add_generation_prompt=case["add_generation_prompt"],
                continue_final_message=case.get("continue_final_message", False),
                **(case["special_tokens"] | case["arguments"]),
            )
        except Exception:
            text = None
        print(json.dumps(text), flush=True)


if __name__ == "__main__":
    main()
