"""The HTML report of a simulation: a self-contained file with the results."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from kvmesh.cli.charts import ChartLine, chart, distribution
from services.whatif.command import main


def test_a_report_is_self_contained(tmp_path: Path, capsys):
    """It has no script and no external address, and shows the results with and without the planner."""
    path = tmp_path / "report.html"
    arguments = ["--rate", "4", "--duration", "20", "--prefill", "1", "--decode", "1", "--planner", "--html", str(path)]
    assert main(arguments) == 0
    table, text = capsys.readouterr().out, path.read_text()
    assert "<script" not in text
    assert not re.search(r"https?://|url\(|src=|href=", text)
    assert text.count("<svg") == 5
    for svg in re.findall(r"<svg.*?</svg>", text):
        ET.fromstring(svg)
    within = re.search(r"1 \+ 1 +(\d+\.\d%)", table)
    assert within is not None
    assert f"<td>{within[1]}</td>" in text
    assert "planner (" in text


def test_names_are_escaped():
    """A model's name may contain any character."""
    svg = chart(title="<b>", x_name="x", y_name="y", lines=[ChartLine(name="a & <b>", points=[(0.0, 1.0), (1.0, 2.0)])])
    assert "<b>" not in svg
    ET.fromstring(svg)


def test_steps_keep_their_value_and_long_lines_are_reduced():
    """A step line keeps each value until the next one. A line never has more points than the chart has pixels."""
    svg = chart(
        title="t", x_name="x", y_name="y", lines=[ChartLine(name="a", points=[(0.0, 0.0), (1.0, 1.0)], is_step=True)]
    )
    assert len(re.search(r'points="([^"]*)"', svg)[1].split()) == 3  # type: ignore[index]
    many = [(float(i), 1.0) for i in range(10_000)]
    points = re.search(
        r'points="([^"]*)"', chart(title="t", x_name="x", y_name="y", lines=[ChartLine(name="a", points=many)])
    )
    assert points is not None
    assert len(points[1].split()) == 600
    assert distribution([1.0, 2.0])[0] == (0.0, 1.0)
    assert chart(title="t", x_name="x", y_name="y", lines=[ChartLine(name="a", points=[])]) == ""
