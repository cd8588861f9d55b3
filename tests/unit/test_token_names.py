"""Names of tokens in log-probabilities are computed once and stored in bounded tables."""

import json

from services.frontend.text.token_names import NameTable, TokenNames


def test_a_name_is_computed_once_and_tables_are_bounded() -> None:
    """A full table drops all its entries."""
    made: list[int] = []

    def make(token_id: int) -> str:
        made.append(token_id)
        return str(token_id)

    names = NameTable(make, entries_max=3)
    assert [names[i] for i in (1, 2, 1, 2, 3)] == ["1", "2", "1", "2", "3"] and made == [1, 2, 3]
    assert (names[4], len(names)) == ("4", 1)
    assert (names[1], made) == ("1", [1, 2, 3, 4, 1])


def test_fields_are_json_up_to_the_number() -> None:
    """The fields are valid for tokens that are part of a character, or that JSON must escape."""
    pieces = {1: b'"\n', 2: b"\xe6\x97", 3: "日".encode()}
    names = TokenNames(lambda token_id: pieces[token_id])
    for token_id, data in pieces.items():
        entry = json.loads(b"{" + names.fields[token_id] + b"-0.5}")
        assert entry == {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": -0.5}
        entry = json.loads(b"{" + names.fields_as_id[token_id] + b"-0.5}")
        assert (entry["token"], entry["bytes"]) == (f"token_id:{token_id}", list(data))
