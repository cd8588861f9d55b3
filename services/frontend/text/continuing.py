"""Continuing the last message of a conversation instead of beginning a new one."""

from services.frontend.pipeline.request import Conversation


def cut_after_final_message(text: str, conversation: Conversation) -> str | None:
    """A rendered conversation up to the end of its last message's text; None when the template does not show that text.

    Templates close every message with marks of their own and may strip its text, so the end is looked for from behind.
    """
    content = conversation.messages[-1].get("content") or ""
    if not isinstance(content, str):
        content = content[-1]["text"]
    start = text.rfind(content.strip())
    if start < 0 or not content.strip():
        return None
    spaced = content.lstrip()
    kept = spaced if text.startswith(spaced, start) else spaced.rstrip()
    return text[: start + len(kept)]
