"""The tables of `kvmesh top`: rows keep their place from one reading to the next."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from textual.widgets import DataTable

from kvmesh.cli.top_columns import Column, Record


class MeshTable(DataTable[Text]):
    """A table that sorts and filters its records."""

    def __init__(self, name: str, columns: Sequence[Column]) -> None:
        super().__init__(id=name, cursor_type="row", zebra_stripes=True)
        self._mesh_columns = columns
        self._records: Mapping[str, Record] = {}
        self._words: Sequence[str] = ()
        self._shown: Sequence[str] = ()
        self._sorted_by: Column | None = None
        self._is_reversed = False

    def on_mount(self) -> None:
        """Adds the columns."""
        for column in self._mesh_columns:
            self.add_column(column.title, key=column.title)

    @property
    def chosen_id(self) -> str:
        """The id of the record at the cursor. Empty: there is none."""
        row = self.cursor_row
        return self._shown[row] if 0 <= row < len(self._shown) else ""

    def show(self, records: Sequence[Record]) -> None:
        """Replaces the records. Ids are unique."""
        self._records = {record.id: record for record in records}
        self._arrange()

    def filter(self, text: str) -> None:
        """Shows the records that have each word."""
        self._words = text.lower().split()
        self._arrange()

    def sort_next(self) -> str:
        """Sorts by the next column, largest number first. Returns its title."""
        at = -1 if self._sorted_by is None else self._mesh_columns.index(self._sorted_by)
        self._sorted_by = self._mesh_columns[(at + 1) % len(self._mesh_columns)]
        self._is_reversed = self._sorted_by.is_number
        self._arrange()
        return self._sorted_by.title

    def reverse(self) -> None:
        """Turns the order round."""
        self._is_reversed = not self._is_reversed
        self._arrange()

    def _arrange(self) -> None:
        wanted = self._ordered()
        if wanted == self._shown:
            self._update_cells()
            return
        chosen, offset = self.chosen_id, self.scroll_offset
        self._shown = wanted
        self.clear()
        for key in wanted:
            self.add_row(*self._cells(key), key=key)
        if wanted:
            row = wanted.index(chosen) if chosen in wanted else min(self.cursor_row, len(wanted) - 1)
            self.move_cursor(row=row, animate=False, scroll=False)
        self.scroll_to(offset.x, offset.y, animate=False)

    def _ordered(self) -> Sequence[str]:
        keys = [key for key in self._records if self._matches(key)]
        column = self._sorted_by
        if column is None:
            return keys[::-1] if self._is_reversed else keys
        # All of a column are numbers, or all are texts.
        values: dict[str, Any] = {key: column.sort(self._records[key].row) for key in keys}
        known = sorted(
            (key for key in keys if values[key] is not None), key=lambda key: values[key], reverse=self._is_reversed
        )
        return [*known, *(key for key in keys if values[key] is None)]

    def _matches(self, key: str) -> bool:
        if not self._words:
            return True
        text = " ".join(column.text(self._records[key].row) for column in self._mesh_columns).lower()
        return all(word in text for word in self._words)

    def _cells(self, key: str) -> Sequence[Text]:
        return [column.cell(self._records[key].row) for column in self._mesh_columns]

    def _update_cells(self) -> None:
        for key in self._shown:
            for column, cell in zip(self._mesh_columns, self._cells(key), strict=True):
                if self.get_cell(key, column.title) != cell:
                    self.update_cell(key, column.title, cell, update_width=True)
