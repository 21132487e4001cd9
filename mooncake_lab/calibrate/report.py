"""A calibration as plain values, as lines of text, and as a page with the scatter."""

from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from string import Template
from typing import Any, Final

from mooncake_lab.book.figures.colours import DARK, FRAME, PAPERS, css_property
from mooncake_lab.book.figures.embed import inlined
from mooncake_lab.calibrate.study import Calibrated
from mooncake_lab.calibrate.workload import HeldOut


def as_plain(done: Calibrated, held_out: HeldOut, about: dict[str, Any]) -> dict[str, Any]:
    """All numbers of a calibration, for JSON.

    Args:
        done: the calibration.
        held_out: what was predicted.
        about: the server and how it was asked.
    """
    model, settings = done.fitted.model, asdict(done.settings)
    assumed = list(settings.pop("assumed"))
    return {
        **about,
        "ended_by": done.seen.ended_by,
        "trace": held_out.source,
        "settings": settings,
        "assumed": assumed,
        "saturation_requests_per_s": done.seen.saturation_per_s,
        "resets_prefix_cache": done.seen.resets_cache,
        "hidden": done.fitted.hidden,
        "model": {
            "prefill": asdict(model.prefill),
            "decode": asdict(model.decode),
            "hybrid": asdict(model.hybrid),
            "elsewhere_s": model.schedule_s,
        },
        "fit": {
            "prompts": len(done.seen.rows.prompts),
            "prompt_error": done.fitted.prompt_error,
            "steps": len(done.seen.rows.steps),
            "step_error": done.fitted.step_error,
            "mixed": len(done.seen.rows.mixed),
            "mixed_error": done.fitted.mixed_error,
        },
        "notes": list(done.notes),
        "rates": list(done.rates),
        "probes": asdict(done.seen.rows),
    }


def lines(plain: dict[str, Any]) -> Iterator[str]:
    """A calibration as text."""
    yield f"{plain['url']} serves {plain['served_model']}; prompts as {plain['prompts_as']}"
    for name, value in plain["settings"].items():
        source = (
            "assumed" if name in plain["assumed"] else "read" if name in plain["read"] else "given or observed"
        )
        yield f"  {name:28} {value} ({source})"
    model = plain["model"]
    prefill = model["prefill"]
    yield (
        f"prompt alone: {_ms(_constant_s(plain))} + {_ms(1e3 * prefill['per_token_s'])} for 1,000 tokens"
        f" + {_ms(1e6 * prefill['per_token_squared_s'])} for the square of 1,000 tokens"
    )
    decode = model["decode"]
    yield (
        f"decode step: {_ms(decode['constant_s'])} + {_ms(decode['per_request_s'])} a request"
        f" + {_ms(1e3 * decode['per_context_token_s'])} for 1,000 tokens of context"
    )
    fit = plain["fit"]
    yield (
        f"fit: {fit['prompts']} prompts, mean error {fit['prompt_error']:.1%}; {fit['steps']} times of steps,"
        f" {fit['step_error']:.1%}"
    )
    if fit["mixed_error"] is not None:
        yield (
            f"prompts among decodes: {fit['mixed']} times, {fit['mixed_error']:.1%}; an iteration hides"
            f" {plain['hidden']:.0%} of {_ms(decode['constant_s'])} behind the computing of its tokens"
        )
    for note in plain["notes"]:
        yield f"note: {note}"
    if plain["saturation_requests_per_s"] is not None:
        yield f"saturation: {plain['saturation_requests_per_s']:.3g} requests/s"
    if plain["rates"]:
        yield ""
        yield "held-out runs: error of the prediction (95 % interval), and the server's own repetition"
        yield _ROW.format("rate", "", "", "measured", "predicted", "error", "interval", "repetition")
    for rate in plain["rates"]:
        for row in rate["errors"]:
            yield _ROW.format(*_cells(rate, row)).rstrip()


_DARK_PAPER: Final = PAPERS[1]
_ROW: Final = "{:>18}  {:10} {:6}  {:>12} {:>12} {:>8}  {:>17}  {:>10}"
_HEADINGS: Final = (
    "rate",
    "quantity",
    "statistic",
    "measured",
    "predicted",
    "error",
    "95 % interval",
    "repetition",
)


def _constant_s(plain: dict[str, Any]) -> float:
    model = plain["model"]
    hybrid_s = model["hybrid"]["constant_s"] if plain["hidden"] is not None else 0.0
    return model["prefill"]["constant_s"] + model["elsewhere_s"] + hybrid_s


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _cells(rate: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    def shown(value: float) -> str:
        return _ms(value) if row["unit"] == "s" else f"{value:.4g}/s"

    repeated = "–" if row["repetition"] is None else f"±{row['repetition']:.1%}"
    return (
        f"{rate['share']:g} ({rate['requests_per_s']:.3g}/s)",
        row["quantity"],
        row["statistic"],
        shown(row["real"]),
        shown(row["simulated"]),
        f"{row['error']:+.1%}",
        f"{row['low']:+.1%} to {row['high']:+.1%}",
        repeated,
    )


_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { $dark } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid #8888; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
</style>
</head>
<body>
<main>
<h1>$title</h1>
$body
</main>
</body>
</html>
""")


def page(plain: dict[str, Any], scatter_svg: str | None) -> str:
    """A calibration as one file of HTML that needs nothing else.

    Args:
        plain: see `as_plain`.
        scatter_svg: the figure; None where nothing was predicted.
    """
    body = [f"<p>Model <code>{escape(str(plain['served_model']))}</code>, prompts as {plain['prompts_as']}.</p>"]
    if plain["ended_by"] is not None:
        body.append(f"<p>The measuring ended early: {escape(plain['ended_by'])}. This is what was observed.</p>")
    if scatter_svg is not None:
        alt = "Predicted against measured latency of each request, with the line of equality"
        body += [
            "<h2>Predicted against measured</h2>",
            f"<figure>{inlined(scatter_svg, 'scatter-', alt)}</figure>",
        ]
        rows = [_cells(rate, row) for rate in plain["rates"] for row in rate["errors"]]
        body += ["<h2>Errors of the prediction</h2>", _table(_HEADINGS, rows, numbers=5)]
        body.append(
            "<p>An error is predicted over measured, less one. Its interval is a bootstrap over requests; that of"
            " throughput is the range over repetitions. <em>Repetition</em> is half the range of the server's own"
            " repetitions, relative to their mean.</p>"
        )
    sources = {**dict.fromkeys(plain["read"], "said by the server"), **dict.fromkeys(plain["assumed"], "assumed")}
    known = [(name, str(v), sources.get(name, "given or observed")) for name, v in plain["settings"].items()]
    body += ["<h2>Settings of the server</h2>", _table(("setting", "value", "from"), known)]
    terms = [(f"{part} {name}", f"{value:.4g}") for part, name, value in _terms(plain["model"]) if value]
    body += ["<h2>Fitted terms</h2>", _table(("term", "seconds"), terms, numbers=1)]
    body += ["<h2>Notes</h2>", "<ul>", *(f"<li>{escape(note)}</li>" for note in plain["notes"]), "</ul>"]
    title = f"Calibration of {plain['url']}"
    dark = {name: dark for name, (_, dark) in FRAME.items()} | {"ground": _DARK_PAPER} | dict(DARK)
    colours = " ".join(f"{css_property(name)}: {colour};" for name, colour in dark.items())
    return _PAGE.substitute(title=escape(title), body="\n".join(body), dark=colours)


def _terms(model: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    for part in ("prefill", "decode", "hybrid"):
        for name, value in model[part].items():
            if name.endswith(("_s", "squared_s")) or "_s_" in name:
                yield part, name, value
    yield "a request waits", "elsewhere_s", model["elsewhere_s"]


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]], *, numbers: int = 0) -> str:
    """A table whose last columns are numbers."""
    first = len(headings) - numbers

    def line(cells: tuple[str, ...], kind: str) -> str:
        words = [
            f"<{kind}{' class=' + chr(34) + 'number' + chr(34) if k >= first else ''}>{escape(cell)}</{kind}>"
            for k, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(words)}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table><thead>{line(headings, "th")}</thead><tbody>\n{body}\n</tbody></table></div>'
