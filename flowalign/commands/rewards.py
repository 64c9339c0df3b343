"""``flowalign rewards``: which judges there are, what each one is, whether it keeps the contract, and a server."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import shutil
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from flowalign.commands import reward_arguments
from flowalign.rewards import contract, registry
from flowalign.rewards.base import RewardSpec
from flowalign.types import FlowAlignError

COLUMNS = ("name", "media", "better", "gradient", "needs")


class Entry(NamedTuple):
    """A name, and its spec, or why there is none."""

    name: str
    spec: RewardSpec | None
    reason: str = ""


def run(args: argparse.Namespace) -> int:
    """Reads ``action`` and what belongs to it; see `flowalign.cli`."""
    actions = {"list": _list, "show": _show, "check": _check, "serve": _serve}
    return actions[args.action](args)


def entries() -> list[Entry]:
    """Every name of the registry, sorted; a plug-in that cannot be loaded does not hide the others."""
    found = []
    for name in registry.names():
        try:
            found.append(Entry(name, _spec(name)))
        except FlowAlignError as error:
            found.append(Entry(name, None, str(error)))
    return found


def _spec(name: str) -> RewardSpec:
    spec = getattr(registry.load(name), "spec", None)
    if not isinstance(spec, RewardSpec):
        raise FlowAlignError(f"reward {name!r}: its class has no RewardSpec as `spec`; add one")
    return spec


def _list(args: argparse.Namespace) -> int:
    found = entries()
    if args.json:
        records = [
            {"name": e.name, **({"reason": e.reason} if e.spec is None else e.spec.as_dict() | {"name": e.name})}
            for e in found
        ]
        print(json.dumps(records, indent=1, ensure_ascii=False))
        return 0
    print("\n".join(_table(found, shutil.get_terminal_size().columns)))
    return 0


def _table(found: Sequence[Entry], width: int) -> list[str]:
    """The facts that decide about a judge's use in columns, and the rest in a paragraph below, ``width`` wide."""
    heads = [COLUMNS, *(_cells(entry) for entry in found)]
    widths = [max(len(cells[i]) for cells in heads) for i in range(len(COLUMNS))]
    below = textwrap.TextWrapper(
        width, initial_indent="    ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    lines = []
    for cells, entry in zip(heads, [None, *found], strict=True):
        lines.append("  ".join(f"{cell:{w}}" for cell, w in zip(cells, widths, strict=True)).rstrip())
        if entry is not None:
            lines += below.wrap(_rest(entry))
    return lines


def _cells(entry: Entry) -> tuple[str, ...]:
    spec = entry.spec
    if spec is None:
        return (entry.name, "-", "-", "-", "-")
    needs = (*spec.needs, *([f"[{spec.extra}]"] if spec.extra else []))
    direction = "higher" if spec.higher_is_better else "lower"
    gradient = "yes" if spec.differentiable else "no"
    return (entry.name, spec.modality, direction, gradient, ", ".join(needs) or "nothing")


def _rest(entry: Entry) -> str:
    spec = entry.spec
    if spec is None:
        return entry.reason
    weights = ", ".join(dict.fromkeys(f"{f.repository}/{f.file}" for f in spec.weights)) or "none"
    return f"licence {spec.licence}; weights {weights}; verified: {spec.verified}"


def _show(args: argparse.Namespace) -> int:
    reward_arguments.make_importable([args.name])
    spec = _spec(args.name)
    facts = spec.as_dict() | {"name": args.name, "params": _params(args.name), "digest": spec.digest()}
    card = _card(args.name)
    if args.json:
        print(json.dumps(facts | {"card": card}, indent=1, ensure_ascii=False, default=str))
        return 0
    width = max(len(key) for key in facts)
    for key, value in facts.items():
        print(f"{key.replace('_', ' '):{width}}  {_readable(key, value)}".rstrip())
    if card is not None:
        print(f"\n{card}")
    return 0


def _params(name: str) -> dict[str, Any]:
    """{parameter of the constructor: default}, "required" where there is none."""
    found = inspect.signature(registry.load(name)).parameters.values()
    return {p.name: "required" if p.default is p.empty else p.default for p in found if p.name != "device"}


def _readable(key: str, value: Any) -> str:
    if key == "weights":
        files = (
            f"{f['repository']}/{f['file']} at {f['revision']}" + (f", sha256 {f['sha256']}" if f["sha256"] else "")
            for f in value
        )
        return "; ".join(files) or "none"
    if key == "scales":
        shown = (f"{n}: (score - {s['offset']:g}) / {s['divisor']:g}" for n, s in value.items())
        return "; ".join(shown) or "none published"
    if key == "native_range":
        low, high = value
        return f"{'-inf' if low is None else format(low, 'g')} to {'inf' if high is None else format(high, 'g')}"
    if key == "params":
        return ", ".join(f"{n}={v!r}" if v != "required" else f"{n} (required)" for n, v in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return "none" if value is None else str(value)


def _module(name: str) -> ModuleType:
    """The module that a reward's class lives in."""
    return importlib.import_module(registry.load(name).__module__)


def _card(name: str) -> str | None:
    """The text of card.md beside the reward's code, if there is one."""
    file = getattr(_module(name), "__file__", None)
    card = Path(file).with_name("card.md") if file else None
    return card.read_text(encoding="utf-8").strip() if card is not None and card.is_file() else None


def _fixture(name: str) -> ModuleType | None:
    """The module `fixture` beside the reward's own, if there is one."""
    module = _module(name).__name__
    wanted = ".".join([*module.split(".")[:-1], "fixture"])
    if "." not in module or importlib.util.find_spec(wanted) is None:
        return None
    return importlib.import_module(wanted)


def _check(args: argparse.Namespace) -> int:
    """Exit 1 where a promise is broken."""
    reward_arguments.make_importable([args.name])
    registry.check_name(args.name)
    options = reward_arguments.params(args.param, [args.name])[args.name]
    fixture = _fixture(args.name)
    make_tiny = getattr(fixture, "tiny", None)
    if args.tiny and make_tiny is None and _spec(args.name).weights:
        raise FlowAlignError(
            f"reward {args.name!r}: offers no tiny weights; leave --tiny out, and give yours with --param path=PATH"
        )
    device = reward_arguments.default_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder), args.name) if args.tiny and make_tiny is not None else {}
        judge = reward_arguments.judges([args.name], {args.name: tiny | options}, device=device)[args.name]
        example = _example(args.name, fixture, judge.spec.modality)
        found = contract.check(judge, example)
    width = max(len(finding.check) for finding in found)
    for finding in found:
        print(f"{'ok' if finding.passed else 'FAILED':6}  {finding.check:{width}}  {' '.join(finding.detail.split())}")
    failed = sum(not finding.passed for finding in found)
    print(f"{args.name}: {len(found) - failed} of {len(found)} kept" + (", with tiny random weights" if tiny else ""))
    return 1 if failed else 0


def _example(name: str, fixture: ModuleType | None, modality: str) -> contract.Example:
    """What the reward itself offers to be checked on, as ``example(name)`` of its fixture or of its own module."""
    for module in (fixture, _module(name)):
        make = getattr(module, "example", None)
        if callable(make) and isinstance(example := make(name), contract.Example):
            return example
    return contract.default_example(modality)


def _serve(args: argparse.Namespace) -> int:
    names = reward_arguments.names(",".join(args.names))
    reward_arguments.make_importable(names)
    options = reward_arguments.params(args.param, names)
    token = args.token
    if args.token_env is not None:
        token = os.environ.get(args.token_env)
        if not token:
            raise FlowAlignError(f"--token-env {args.token_env}: there is no such variable, or it is empty; export it")
    server = importlib.import_module("flowalign.rewards.server")
    served = server.serve(
        names,
        host=args.host,
        port=args.port,
        token=token,
        device=reward_arguments.default_device(args.device),
        params=options,
        allow_public=args.allow_public,
        batch_size=args.batch_size,
    )
    return int(served or 0)
