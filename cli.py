"""The command line. A command only gathers what others do."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import asdict
from inspect import signature
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import fastgraph
from fastgraph.config import EngineConfig
from fastgraph.errors import FastgraphError, RequestError
from fastgraph.flags import CHAT_SAMPLING, ENGINE, SAMPLING, FlagGroup, takes


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FastgraphError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            print(f"error: {error}", file=sys.stderr)
            os._exit(1)  # at its end Python would try to write the rest, and fail again


app = typer.Typer(
    cls=_Group,
    help="Run language models: talk to one, complete a text, see what this machine can do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(fastgraph.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@takes(ENGINE, CHAT_SAMPLING)
def chat(
    engine: EngineConfig,
    sampling: dict[str, Any],
    question: Annotated[str | None, typer.Argument(help="Answer this, and end.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before all else.")] = None,
    think: Annotated[
        Literal["on", "off"] | None, typer.Option(help="Whether to think first, for a model that can do both.")
    ] = None,
    overflow: Annotated[
        Literal["stop", "trim"], typer.Option(help="When the context is full: stop, or drop the oldest turns.")
    ] = "stop",
) -> None:
    """Talk to a model. With a question, or one piped in, answer that and end."""
    from rich.console import Console

    from fastgraph.chat.conversation import Conversation, join_question
    from fastgraph.chat.prompt import reader
    from fastgraph.chat.session import Chat, Models, answer_once
    from fastgraph.terminal import piped_text

    asked = join_question(question, piped_text())
    with Models(engine) as models:
        conversation = Conversation(models.llm, sampling, system, overflow, None if think is None else think == "on")
        if asked is not None:
            raise typer.Exit(answer_once(conversation, asked))
        console = Console(highlight=False, stderr=not sys.stdout.isatty())
        Chat(conversation, reader(), console, models).run()


@app.command()
@takes(ENGINE, SAMPLING)
def generate(
    engine: EngineConfig,
    sampling: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="The text to complete; - or nothing reads stdin.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Complete a text, as it stands: no chat template."""
    from fastgraph.terminal import load, piped_text, write

    if sampling.get("logprobs") and not as_json:
        raise typer.BadParameter("log-probabilities are printed with --json only")
    if prompt is None or prompt == "-":
        # The newline that `echo` ends with is not meant.
        prompt = sys.stdin.read() if sys.stdin.isatty() else (piped_text() or "").removesuffix("\n")
        if not prompt:
            raise RequestError('there is no prompt: give one, or pipe it in; "" completes an empty text')
    with load(engine) as llm:
        if not as_json and sampling.get("n", 1) == 1:
            for piece in llm.stream(prompt, **sampling):
                write(piece)
            write("\n")
            return
        answers: Any = llm.generate(prompt, **sampling)
        answers = answers if isinstance(answers, list) else [answers]
        if as_json:
            objects = [_as_object(answer) for answer in answers]
            print(json.dumps(objects[0] if len(objects) == 1 else {"completions": objects}, ensure_ascii=False))
        else:
            write("\n---\n".join(answer.text for answer in answers) + "\n")


def _as_object(answer: Any) -> dict[str, Any]:
    fields = asdict(answer)
    return {name: value for name, value in fields.items() if value is not None}


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is installed, what this machine can do, what is missing and how to get it."""
    from fastgraph.env import report, show

    found = report()
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        show(found)


@app.command()
@takes(ENGINE)
def kernels(
    engine: EngineConfig,
    explain: Annotated[bool, typer.Option("--explain", help="Say of each why it serves or not.")] = False,
) -> None:
    """Which implementation of each op serves: of a model if one is named, else of one like Llama 3.1 8B."""
    from fastgraph.env import show_kernels

    show_kernels(engine, explain)


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the architectures that run, and the file that runs each; docs/add-a-model.md adds another."""
    from fastgraph import models as shelf

    found = {architecture: shelf.described(module) for architecture, module in sorted(shelf.supported().items())}
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        wide = max(map(len, found))
        print("\n".join(f"{name:{wide}}  {entry['file']:20}  {entry['runs']}" for name, entry in found.items()))


@app.command()
def replay(file: Annotated[str, typer.Argument(help="What --trace wrote.")]) -> None:
    """Run the scheduler again, without a model, on what a trace says it was given: do the same plans come of it?"""
    from fastgraph.control.trace import replay as run_again
    from fastgraph.terminal import Loading

    with Loading() as loading:
        found = run_again(file, tell=lambda share: loading.tell("replaying", share))
    print(f"{found.requests} requests, {found.aborts} aborts, {found.steps} steps")
    if not found.whole and found.difference is None:
        print("the trace stops before its engine ended: what came later is not in it")
    if found.difference is not None:
        print(found.difference)
        raise typer.Exit(1)
    print("every plan is the one in the trace")


bench = typer.Typer(help="Measure speed, with its spread and its share of what this machine could do.")
app.add_typer(bench, name="bench", no_args_is_help=True)

_Json = Annotated[str | None, typer.Option("--json", help="Write everything found to this file; - is stdout.")]
_Repeats = Annotated[int, typer.Option(min=1, help="Measured runs, after a warm-up that does not count.")]
_Temperature = Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")]
_Seed = Annotated[int, typer.Option(min=0, help="Of the workload and of sampling.")]


@bench.command()
@takes(ENGINE)
def latency(
    engine: EngineConfig,
    batch: Annotated[str, typer.Option(help="How many requests at once: a list like 1,8,32.")] = "1",
    context: Annotated[
        str | None, typer.Option(help="Tokens that each has while steps are measured: a list; else as in the requests.")
    ] = None,
    prefill: Annotated[str | None, typer.Option(help="Tokens of single prompts to measure: a list; else n-in.")] = None,
    arms: Annotated[
        str | None,
        typer.Option(help="Ways that take turns: of eager, graphs, full+graphs, compile+graphs; on a CPU, compile."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="List the kernels of each step and their times.")] = False,
    n_in: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    n_out: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    repeats: _Repeats = 5,
    temperature: _Temperature = 0.0,
    seed: _Seed = 0,
    json_to: _Json = None,
) -> None:
    """Requests of one length, alone and in batches; then their steps, on the device and on the host, and a prefill."""
    from fastgraph.bench.commands import run_latency

    batches = _sizes("--batch", batch)
    steps = {
        "contexts": _sizes("--context", str(n_in + n_out // 2) if context is None else context),
        "prefills": _sizes("--prefill", str(n_in) if prefill is None else prefill),
        "arms": None if arms is None else arms.split(","),
    }
    options = {"n_in": n_in, "n_out": n_out, "repeats": repeats, "temperature": temperature, "seed": seed}
    run_latency(engine, batches, options, steps, json_to, profile)


def _sizes(flag: str, text: str) -> list[int]:
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        sizes = []
    if min(sizes, default=0) < 1:
        raise typer.BadParameter(f"{flag} takes sizes like 1,8,32, not {text!r}")
    return sizes


def _load(
    workload: Annotated[
        str,
        typer.Option(help="chat, repeated_sampling, multi_turn, with commas for several; or a JSONL file."),
    ] = "chat",
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of chat, samples of each prompt, or sessions of multi_turn.")
    ] = None,
    repeats: _Repeats = 5,
    temperature: _Temperature = 0.0,
    seed: _Seed = 0,
    decode_text: Annotated[
        bool, typer.Option("--decode-text", help="Make text of the answers, and count its time too.")
    ] = False,
) -> None:
    """The flags that say what a workload is."""


_LOAD = FlagGroup("load", list(signature(_load, eval_str=True).parameters.values()), dict)


@bench.command()
@takes(ENGINE, _LOAD)
def throughput(engine: EngineConfig, load: dict[str, Any], json_to: _Json = None) -> None:
    """A workload asked for all at once: tokens a second, and their share of what this machine could do."""
    from fastgraph.bench.commands import run_load

    run_load(engine, "throughput", load, json_to)


@bench.command()
@takes(ENGINE, _LOAD)
def serve(
    engine: EngineConfig,
    load: dict[str, Any],
    rate: Annotated[float | None, typer.Option(help="Sessions begin at random, so many a second.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Or so many are under way at any time.")] = None,
    json_to: _Json = None,
) -> None:
    """A workload that comes little by little: how long users wait for their first token, and for the next."""
    from fastgraph.bench.commands import run_load

    if (rate is None) == (concurrency is None) or (rate is not None and not 0 < rate < float("inf")):
        raise typer.BadParameter("take either --rate, above 0, or --concurrency")
    run_load(engine, "serve", {"rate": rate, "concurrency": concurrency, **load}, json_to)


def main() -> None:
    # What the caller has closed Python leaves out, and the next file that is opened would take its place.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - for as long as the process
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a letter must not end an answer
    try:
        app()
    except SystemExit as end:
        if end.code == 130:
            # The engine's thread may be stuck in a long step still, and Python would stumble over it at its end.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130)
        raise


if __name__ == "__main__":
    main()
