"""The description of a family of formats."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.frontend.parsers.feed import Feed, Reader, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """A format of tool calls.

    `readers`: the reader for each opening mark. It is entered after the mark and returns after the closing mark; it raises
    Malformed if the text is not a call.
    `closing_marks`: further marks that may be special tokens and must reach the readers.
    `template_marks`: a chat template that fits the family contains at least one of these texts.
    `mark_tokens`: special tokens that are parts of marks.
    `hidden_marks`: marks that never become content, because they are special tokens without meaning outside of a call.
    `interrupting_marks`: further texts that end an incomplete value, beside the marks.
    `call_id_characters`: length of call ids that the family's templates require; 0: any.
    `gives_call_ids`: ids that the model writes are passed on, because its template needs them in the next turn.
    """

    name: str
    readers: Mapping[str, Reader] = field(default_factory=dict)
    closing_marks: Sequence[str] = ()
    mark_tokens: Sequence[str] = ()
    hidden_marks: Sequence[str] = ()
    interrupting_marks: Sequence[str] = ()
    template_marks: Sequence[str] = ()
    call_id_characters: int = 0
    gives_call_ids: bool = False

    @property
    def marks(self) -> frozenset[str]:
        """Marks that the detokeniser must not skip if they are special tokens."""
        return frozenset((*self.searched_marks, *self.mark_tokens))

    @property
    def searched_marks(self) -> Sequence[str]:
        """Marks that are searched for in content."""
        return (*self.readers, *self.closing_marks)

    @property
    def stops(self) -> frozenset[str]:
        """Marks that end an incomplete value. A bracket that may begin a call does not."""
        return frozenset(mark for mark in (*self.searched_marks, *self.interrupting_marks) if len(mark) > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFamily:
    """A format of reasoning between two marks.

    `openings`, `closings`: the spellings of each mark.
    `is_open`: answers begin inside reasoning unless the end of the prompt shows otherwise; old templates and their models omit
    the opening mark.
    `ends_at_tools`: a tool call's mark ends reasoning too, since models forget the closing mark before calls.
    `template_marks`, `hidden_marks`, `mark_tokens`: see ToolFamily. Without `template_marks`, `openings` and `closings` count.
    `answer_marks`: an opening and a closing mark around the answer that follows.
    `label`: text that the model may write after the opening mark before it reasons.
    """

    name: str
    openings: Sequence[str]
    closings: Sequence[str]
    is_open: bool = False
    ends_at_tools: bool = True
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
        """Returns whether an answer to a prompt with this end begins with reasoning that has no opening mark."""
        tail = prompt_tail.rstrip().removesuffix(self.label.rstrip())
        if tail.endswith(tuple(self.openings)):
            return True
        return self.is_open and not tail.endswith(tuple(self.closings))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFamily:
    """A format in which marks structure the whole answer, such as harmony: one grammar for tools and reasoning.

    `reader` reads the whole answer.
    """

    name: str
    reader: Callable[[Feed], Steps]
    special_marks: Sequence[str]
    template_marks: Sequence[str] = ()

    @property
    def marks(self) -> frozenset[str]:
        """See ToolFamily."""
        return frozenset(self.special_marks)
