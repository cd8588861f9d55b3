"""The description of a family of formats."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.frontend.parsers.feed import Feed, Reader, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """A format of tool calls.

    `readers`: what reads on behind each opening mark; the mark was taken, the cursor stands behind it. A reader begins calls
    on its feed and returns behind the closing mark; it raises Malformed where the text is no call.
    `opening`: tried once where the content begins, before any mark was seen; it raises Malformed("") when nothing is there.
    `closing_marks`: further marks that may be special tokens and must reach the readers.
    `template_marks`: texts of which a fitting chat template has at least one, the more telling first.
    `mark_tokens`: special tokens that are parts of marks.
    `hidden_marks`: marks that never become content, because they are special tokens and say nothing outside of a call.
    `interrupting_marks`: further texts that end a value that is not whole, beside the marks themselves.
    `call_id_characters`: length of call ids that the family's templates insist on; 0: any.
    `gives_call_ids`: ids that the model writes are passed on, because its template wants them back.
    """

    name: str
    readers: Mapping[str, Reader] = field(default_factory=dict)
    opening: Reader | None = None
    closing_marks: Sequence[str] = ()
    mark_tokens: Sequence[str] = ()
    hidden_marks: Sequence[str] = ()
    interrupting_marks: Sequence[str] = ()
    template_marks: Sequence[str] = ()
    call_id_characters: int = 0
    gives_call_ids: bool = False

    @property
    def marks(self) -> frozenset[str]:
        """Marks that must not be left out of the text, even where they are special tokens."""
        return frozenset((*self.searched_marks, *self.mark_tokens))

    @property
    def searched_marks(self) -> Sequence[str]:
        """Marks that are looked for in content."""
        return (*self.readers, *self.closing_marks)

    @property
    def stops(self) -> frozenset[str]:
        """Marks that end a value that is not whole. A bracket that may begin a call is none."""
        marks = (*self.readers, *self.closing_marks, *self.interrupting_marks)
        return frozenset(mark for mark in marks if len(mark) > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFamily:
    """A format of reasoning between two marks.

    `is_open`: answers begin inside, unless the prompt's end says otherwise: old templates leave the opening mark out of both.
    `ends_at_tools`: a tool call's mark ends reasoning too: models forget the closing mark before calls.
    `openings`, `closings`: each any of several spellings.
    `answer_marks`: an opening and a closing mark around the answer that follows.
    `hidden_marks`, `mark_tokens`: see ToolFamily.
    `label`: what the model may write behind the opening mark before it reasons.
    """

    name: str
    openings: Sequence[str]
    closings: Sequence[str]
    is_open: bool = False
    ends_at_tools: bool = False
    template_marks: Sequence[str] = ()
    answer_marks: Sequence[str] = ()
    label: str = ""
    hidden_marks: Sequence[str] = ()
    mark_tokens: Sequence[str] = ()

    @property
    def marks(self) -> frozenset[str]:
        """See ToolFamily."""
        return frozenset((*self.searched_marks, *self.mark_tokens))

    @property
    def searched_marks(self) -> Sequence[str]:
        """See ToolFamily."""
        return (*self.openings, *self.closings, *self.answer_marks, *self.hidden_marks)

    def begins_inside(self, prompt_tail: str) -> bool:
        """Whether an answer to a prompt with this end begins with reasoning that has no opening mark."""
        tail = prompt_tail.rstrip().removesuffix(self.label.rstrip())
        if tail.endswith(tuple(self.openings)):
            return True
        return self.is_open and not tail.endswith(tuple(self.closings))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFamily:
    """A format in which every answer is written with marks from its first token on, such as harmony: tools and reasoning are
    one grammar. `reader` reads the whole answer."""

    name: str
    reader: Callable[[Feed], Steps]
    special_marks: Sequence[str]
    template_marks: Sequence[str] = ()

    @property
    def marks(self) -> frozenset[str]:
        """See ToolFamily."""
        return frozenset(self.special_marks)
