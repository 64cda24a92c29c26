"""The learning curves of a sweep in one chart: held-out success over sampled tokens, a line a run."""

from collections.abc import Mapping

from markupsafe import Markup

from agentrl.eval.pages import Section
from agentrl.eval.sweep.plan import SweepPlan
from agentrl.eval.sweep.table import End, rows_of, sections
from agentrl.runs.report.axes import Frame, draw_axes
from agentrl.runs.report.text import brief, percent, tag


def pages(plan: SweepPlan, ends: Mapping[str, End]) -> list[Section]:
    """Return the sections of the sweep's page: the chart, then what the terminal shows."""
    figure = chart(plan)
    curves = [Section(title="Learning curves", figure=figure)] if figure else []
    return [*curves, *sections(plan, ends)]


def chart(plan: SweepPlan) -> Markup:
    """Draw the runs that are done; empty where there are none."""
    rows = [row for row in rows_of(plan) if row.values is not None and row.done]
    reach = max((tokens for row in rows for run in row.done for tokens, _ in run.curve), default=0.0)
    if reach <= 0:
        return Markup()
    frame = Frame(width=760, height=380, margin=(18, 30, 34, 62), steps=(0, reach), values=(0, 1))
    lines: list[Markup] = []
    keys: list[Markup] = []
    for number, row in enumerate(rows):
        name = ", ".join(row.values or ())
        # Neighbouring hues lie far apart, however many there are.
        hue = f"hsl({137.5 * number % 360:.0f}, 65%, 45%)"
        for seed, run in zip(plan.seeds, row.results, strict=True):
            if run is not None and run.curve:
                tokens, success = run.curve[-1]
                about = f"{name}, seed {seed}: {percent(success)} after {brief(tokens)} tokens"
                lines.append(tag("path", tag("title", about), d=frame.path(run.curve), stroke=hue))
        swatch = tag("svg", tag("path", d="M1 5H21", stroke=hue), viewBox="0 0 22 10", aria_hidden="true")
        keys.append(tag("span", swatch, name, class_="key"))
    body = [draw_axes(frame, about=(6, 5), unit="tokens"), tag("g", *lines)]
    drawn = tag("svg", *body, viewBox=f"0 0 {frame.width:g} {frame.height:g}", role="img", aria_label="Success")
    caption = tag("figcaption", tag("b", "Held-out success over sampled tokens"), *keys)
    return tag("figure", caption, drawn, class_="chart curves")
