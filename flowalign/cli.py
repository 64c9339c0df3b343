"""The command line. Nothing heavy is imported before a command runs, so that help is instant."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from flowalign import __version__

DESCRIPTION = "Align text-to-image and text-to-video flow models with rewards."
EXAMPLES = {
    "demo": "flowalign demo --output runs/demo",
    "train": "flowalign train shapes/flow_grpo training.iterations=20 optimizer.lr=1e-4",
    "sample": 'flowalign sample shapes-sd3 --prompt "a red circle" --prompt "two blue squares" --guidance 1 --steps 10',
    "score": 'flowalign score out/ --reward shapes-verifier --prompt "a red circle"',
    "rewards": "flowalign rewards list",
    "evaluate": "flowalign evaluate shapes-sd3 --lora runs/demo/lora --prompts shapes:held_out --seeds 0,1",
    "export": "flowalign export runs/demo/checkpoints/last --format diffusers --out my-lora",
}


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    main_parser = argparse.ArgumentParser(
        prog="flowalign",
        description=DESCRIPTION,
        epilog="example:\n  flowalign demo\n\n'flowalign COMMAND --help' shows what a command takes, with an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main_parser.add_argument("--version", action="version", version=f"flowalign {__version__}")
    commands = main_parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (add_arguments, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  {EXAMPLES[name]}",
            formatter_class=_HelpFormatter,
        )
        add_arguments(command)
    return main_parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the example as it is written and shows defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default == [] or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


def _overrides(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", default=[], help="settings to change, such as training.seed=1"
    )


def _demo(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", default="runs/demo", help="folder for pictures, report and LoRA")
    _overrides(command)


def _train(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", help="a recipe file, or the name of a shipped one such as shapes/flow_grpo")
    command.add_argument("--resume", action="store_true", help="go on from the last checkpoint in training.output")
    _overrides(command)


def _precision(command: argparse.ArgumentParser) -> None:
    command.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the model's weights")


def _sequence_length(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-sequence-length",
        type=_positive,
        metavar="N",
        help="tokens of the long text encoder; left out: the pipeline's own default",
    )


def _size(command: argparse.ArgumentParser) -> None:
    command.add_argument("--height", type=_positive, help="in pixels; left out: the model's own")
    command.add_argument("--width", type=_positive, help="in pixels; left out: the model's own")


def _sample(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="shapes-sd3, a diffusers folder or a hub name")
    command.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    command.add_argument("--prompts", metavar="FILE", help="a .txt or .jsonl file, or shapes:held_out")
    command.add_argument("--lora", metavar="FILE", help="a diffusers LoRA file to load")
    command.add_argument("--steps", type=_positive, default=28, help="denoising steps")
    command.add_argument("--guidance", type=_at_least_one, default=4.5, help="classifier-free guidance; 1 = off")
    command.add_argument("--negative", default="", metavar="TEXT", help="what guidance steers away from")
    command.add_argument("--seed", type=_non_negative, default=0, help="same seed, same pictures")
    command.add_argument("--num-images", type=_positive, default=1, metavar="N", help="pictures of each prompt")
    _size(command)
    _sequence_length(command)
    _precision(command)
    command.add_argument("--out", default="out", help="folder for the pictures")


def _judging(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="a parameter of a reward, such as pickscore.path=/weights; may be given several times",
    )
    command.add_argument("--device", help="cpu, cuda, cuda:1, ...; left out: the GPU if there is one")


def _score(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "path",
        help="a picture, a video or a folder of them; captions are in metadata.jsonl, in a .txt of the same name, or "
        "come by --prompt",
    )
    command.add_argument("--reward", required=True, metavar="NAME[,NAME]", help="the judges; `flowalign rewards list`")
    _judging(command)
    command.add_argument("--prompt", metavar="TEXT", help="what all that has no caption should show")
    command.add_argument(
        "--out", default="scores.csv", metavar="FILE", help="table, .csv, .jsonl or .parquet, with a contact sheet"
    )
    command.add_argument(
        "--frames",
        default="mean",
        metavar="POLICY",
        help="of a video, for judges of images: first, middle, mean, min or uniform:K",
    )
    command.add_argument("--fps", type=_rate, metavar="N", help="frames a second to look at; left out: all")
    command.add_argument("--batch-size", type=_positive, default=32, metavar="N", help="files scored at a time")
    command.add_argument(
        "--max-megapixels", type=_rate, default=256.0, metavar="N", help="of all frames of a file that is still read"
    )
    command.add_argument(
        "--restart", action="store_true", help="begin anew, instead of going on where a run was stopped"
    )


def _rewards(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, summary: str, example: str) -> argparse.ArgumentParser:
        return actions.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  flowalign rewards {example}",
            formatter_class=_HelpFormatter,
        )

    listing = action("list", "list all judges with the facts about each", "list --json")
    listing.add_argument("--json", action="store_true", help="as JSON")
    show = action("show", "show all facts about a judge, its parameters and its card", "show pickscore")
    show.add_argument("name", help="a name of the list, or package.module:Class")
    show.add_argument("--json", action="store_true", help="as JSON")
    check = action("check", "check that a judge keeps the contract", "check my_rewards:Sharpness --param radius=2")
    check.add_argument("name", help="a name of the list, or package.module:Class")
    _judging(check)
    check.add_argument("--tiny", action="store_true", help="with tiny random weights, instead of the published ones")
    serve = action("serve", "answer requests for scores over HTTP", "serve pickscore --port 8000 --token-env TOKEN")
    serve.add_argument("names", nargs="+", metavar="NAME", help="the judges")
    _judging(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serve.add_argument("--port", type=_port, default=8000, help="0: any that is free")
    serve.add_argument("--batch-size", type=_positive, default=32, metavar="N", help="media judged at a time")
    token = serve.add_mutually_exclusive_group()
    token.add_argument("--token-env", metavar="VARIABLE", help="environment variable with the token that clients show")
    token.add_argument("--token", metavar="TEXT", help="the token itself, which others on this machine can see")
    serve.add_argument("--allow-public", action="store_true", help="listen to other machines without a token")


def _evaluate(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="shapes-sd3, a diffusers folder or a hub name")
    command.add_argument(
        "--lora", nargs="+", default=[], metavar="PATH", help="LoRA files; each is compared with the model without"
    )
    command.add_argument(
        "--prompts", default="shapes:held_out", metavar="SOURCE", help="prompts that training did not see"
    )
    command.add_argument("--count", type=_positive, default=128, help="prompts")
    command.add_argument("--seeds", type=_seeds, default="0,1", metavar="SEED[,SEED]", help="pictures of each prompt")
    command.add_argument("--reward", default="shapes-verifier", metavar="NAME[,NAME]", help="the judges")
    command.add_argument("--steps", type=_positive, default=10, help="denoising steps")
    command.add_argument("--guidance", type=_at_least_one, default=1.0, help="classifier-free guidance; 1 = off")
    _size(command)
    _sequence_length(command)
    _precision(command)
    command.add_argument("--out", default="runs/evaluate", help="folder for the report and the pictures")


def _export(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", help="a checkpoint folder of a run")
    command.add_argument(
        "--format",
        choices=["diffusers", "merged"],
        default="diffusers",
        help="one LoRA file, or a whole merged pipeline",
    )
    command.add_argument(
        "--weights",
        choices=["current", "ema", "behaviour", "anchor", "reference"],
        default="current",
        help="which weights of the run: those in training, or others that it keeps",
    )
    command.add_argument("--out", required=True, help="folder to write to")


COMMANDS = {
    "demo": (_demo, "align the embedded model in a few minutes and show it before and after"),
    "train": (_train, "train a model as a recipe says"),
    "sample": (_sample, "make pictures from prompts"),
    "score": (_score, "score pictures and videos with rewards"),
    "rewards": (_rewards, "list, show, check or serve the judges"),
    "evaluate": (_evaluate, "compare a model before and after, on equal prompts and seeds, with a bootstrap interval"),
    "export": (_export, "write a checkpoint as a file that diffusers loads"),
}


def _positive(text: str) -> int:
    return _whole(text, 1)


def _non_negative(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from {low}")
    return value


def _port(text: str) -> int:
    value = _non_negative(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a port from 0 to 65535")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return value


def _at_least_one(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 1 (1 = off)")
    return value


def _seeds(text: str) -> tuple[int, ...]:
    seeds = tuple(_non_negative(part.strip()) for part in text.split(","))
    if len(set(seeds)) != len(seeds):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected different seeds")
    return seeds


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line as a namespace; exits with 2 and a sentence where it cannot be understood."""
    main_parser = parser()
    args, rest = main_parser.parse_known_args(arguments)
    # argparse takes all key=value at once, so that those after an option are left over.
    late = [text for text in rest if "=" in text and not text.startswith("-")]
    if hasattr(args, "overrides"):
        args.overrides = [*args.overrides, *late]
        rest = [text for text in rest if text not in late]
    if rest:
        main_parser.error(f"unrecognized arguments: {' '.join(rest)}; see flowalign {args.command} --help")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the only place that turns exceptions into messages.

    Returns:
        0, 1 for a fault of flowalign, 2 for a mistake of the user, 130 for Ctrl-C, 141 where nobody reads on.
    """
    try:
        args = parse(sys.argv[1:] if arguments is None else arguments)
        status = int(importlib.import_module(f"flowalign.commands.{args.command}").run(args))
        sys.stdout.flush()
        return status
    except SystemExit as stop:  # argparse: help or a usage error
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        print("flowalign: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at exit
        return 141
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    if os.environ.get("FLOWALIGN_DEBUG") == "1":
        traceback.print_exception(error)
    from flowalign.types import FlowAlignError

    if isinstance(error, FlowAlignError):
        print(error, file=sys.stderr)
        return 2
    if os.environ.get("FLOWALIGN_DEBUG") != "1":
        reason = " ".join(str(error).split())
        hint = "set FLOWALIGN_DEBUG=1 to see where it happened"
        print(f"flowalign: {type(error).__name__}: {reason} ({hint})", file=sys.stderr)
    return 1
