"""Writes docs/api.md from the docstrings of the public names; --check only compares."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from generated_page import write_or_check

sys.path.insert(0, str(Path(__file__).parent.parent / "torch-ext"))

import optimizer
from optimizer.parameters.options import ARGUMENTS

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
HEAD = """# API

`scripts/api_page.py` makes this page from the docstrings. Names are attributes of the package that
`get_kernel` returns, except classes of results, such as `summary.Summary`, which have the names of
their modules in `extras`. [Options](options.md) lists the arguments that groups can have, too.
"""
# Names by section. Those with a colon are not attributes of the package: "module:name".
SECTIONS = {
    "Make an optimizer": "Muon Muon.for_model get_default_muon_param_groups default_is_muon "
    "Muon.add_param_group Muon.names Muon.process_group MuonForTrainer",
    "Step": "Muon.step Muon.is_broken Muon.accept_partial_step",
    "State and checkpoints": "Muon.state_dict Muon.load_state_dict Muon.load_foreign_state_dict "
    "extras.foreign_checkpoints: Muon.exact_weights Muon.load_exact_weights Muon.discard_state",
    "Look and check": "describe extras.describe:Description extras.describe:Trap selfcheck "
    "extras.selfcheck:Report Muon.summary extras.summary:Summary Muon.audit extras.audit:Audit "
    "extras.audit:Audit.report extras.audit:Audit.stop extras.audit:Report Muon.metrics",
    "QK-Clip": "QKLogitRecorder QKLogitRecorder.observe QKLogitRecorder.observe_scores "
    "QKLogitRecorder.take QKLogitRecorder.discard QKLogitRecorder.remove QKLogitRecorder.names "
    "QKLogitRecorder.forwards Muon.qk_recorder Muon.set_qk_logits Muon.qk_clip_stats "
    "max_qk_logits qk_clip.reduce_qk_logits",
    "Offload": "Muon.turn_on_cpu_offload Muon.turn_off_cpu_offload Muon.cpu_offload "
    "Muon.synchronize_offload SimulatedHost",
    "Orthogonalization": "newton_schulz.newton_schulz newton_schulz.default_dtype",
    "Presets and recipes": "presets MuonAdamW DistMuonAdamW recipes",
}
LISTS = ("Args:", "Attributes:", "Raises:")
LABELS = (*LISTS, "Returns:", "Example:")


def entries(names: str) -> dict[str, Any]:
    """The objects of a section by title; presets and recipes bring their functions with them."""
    found = {}
    for name in names.split():
        title = name.removeprefix("extras.").removesuffix(":").replace(":", ".")
        title = title.removeprefix("audit.") if title.count(".") > 1 else title
        path = f"optimizer.{name}" if ":" in name else f"optimizer:{name}"
        found[title] = value = pkgutil.resolve_name(path)
        if inspect.ismodule(value) and ":" not in name:
            functions = {f"{title}.{each}": getattr(value, each) for each in value.__all__}
            found |= {key: each for key, each in functions.items() if inspect.isfunction(each)}
    return found


def check_complete(titles: set[str]) -> None:
    """Raises ValueError unless all public names are on the page."""
    public = {*optimizer.__all__} - {"muon", "newton_schulz", "qk_clip"}
    classes = [each for each in optimizer.Muon.__mro__ if each.__module__.startswith("optimizer.")]
    public |= {f"Muon.{name}" for each in classes for name in vars(each) if name[0] != "_"}
    if missing := public - titles:
        raise ValueError(f"public names in no section: {sorted(missing)}")


def call(title: str, value: Any, doc: str) -> str:
    """The call, wrapped; options that only docs/options.md describes are ``**options``."""
    described = set(re.findall(r"\w+", " ".join(re.findall(r"^    ([\w, ]+):", doc, re.M))))
    parts: list[str] = []
    more: set[str] = set()
    for name, p in inspect.signature(value).parameters.items():
        is_keyword = p.kind is p.KEYWORD_ONLY
        if is_keyword and name in ARGUMENTS and name not in described:
            more = {"**options"}
        elif name not in ("self", "unknown"):
            stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(p.kind.name, "")
            default = getattr(p.default, "__name__", repr(p.default)).replace("'", '"')
            parts += ["*"] if is_keyword and "*" not in parts else []
            parts.append(f"{stars}{name}" + ("" if p.default is p.empty else f"={default}"))
    text = ", ".join(part.replace(" ", "~") for part in [*parts, *more.difference(parts)])
    return textwrap.fill(f"{title}({text})", 100, subsequent_indent="    ").replace("~", " ")


def markdown(doc: str) -> str:
    """A docstring as Markdown: its sections as lists, its examples as code."""
    lines: list[str] = []
    section = ""
    for line in doc.splitlines():
        if line.lstrip().startswith((">>> ", "... ")):
            lines = lines[:-1] if lines[-1:] == ["```"] else [*lines, "```py"]
            lines += [line.lstrip()[4:], "```"]
        elif line in LABELS:
            section = line
            lines += [line.replace("Args", "Arguments"), ""]
        elif section in LISTS and line.startswith("    "):
            entry = re.match(r"    (\w[\w, ]*): (.*)", line)
            names = re.sub(r"(\w+)", r"`\1`", entry[1]) if entry else ""
            lines.append(f"- {names}: {entry[2]}" if entry else line[6:])
        else:
            section = section if line.startswith("    ") or not line else ""
            lines.append(re.sub("::$", ":", line[4:] if section else line))
    return "\n".join(lines)


def linked(text: str, titles: set[str]) -> str:
    """The text with links to other pages, and from names to their entries where one fits."""
    targets: dict[str, str] = {}
    for title in sorted(titles):
        short = title.split(".")[-1]
        targets[short] = "" if short in targets else title
    targets |= {title: title for title in titles}

    def link(match: re.Match[str]) -> str:
        title = targets.get(match[1])
        return f"[{match[0]}](#{title.lower().replace('.', '')})" if title else match[0]

    text = re.sub(r"(?<!`)`([\w.]+)`(?!`)", link, text)
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)


def made() -> str:
    sections = {heading: entries(names) for heading, names in SECTIONS.items()}
    titles = {title for values in sections.values() for title in values}
    check_complete(titles)
    contents = (f"[{heading}](#{heading.lower().replace(' ', '-')})" for heading in sections)
    page = [HEAD, " · ".join(contents), ""]
    for heading, values in sections.items():
        page += [f"## {heading}", ""]
        for title, value in values.items():
            doc = inspect.getdoc(value) or ""
            page += [f"### `{title}`", ""]
            if isinstance(value, property):
                page += ["Property." if value.fset is None else "Property that can be set.", ""]
            elif callable(value) and not (inspect.isclass(value) and "." in title):
                page += ["```py", call(title, value, doc), "```", ""]
            elif dataclasses.is_dataclass(value):
                doc = doc.replace("Args:\n", "Attributes:\n")
            page += [markdown(linked(doc, titles)), ""]
    return "\n".join(page).rstrip() + "\n"


if __name__ == "__main__":
    write_or_check(PAGE, made(), __doc__)
