"""The command line: `fastgraph chat`, `generate`, `env` and `bench`. Each command only gathers what others do."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import fastgraph
from fastgraph.config import EngineConfig
from fastgraph.errors import FastgraphError
from fastgraph.flags import CHAT_SAMPLING, ENGINE, SAMPLING, takes


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FastgraphError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error


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
) -> None:
    """Talk to a model. With a question, or one piped in, answer that and end."""
    from rich.console import Console

    from fastgraph.chat import Chat, Conversation, answer_once, join_question, reader
    from fastgraph.terminal import load, piped_text

    asked = join_question(question, piped_text())
    with load(engine) as llm:
        conversation = Conversation(llm, sampling, system)
        if asked is not None:
            raise typer.Exit(answer_once(conversation, asked))
        Chat(conversation, reader(), Console(highlight=False, stderr=not sys.stdout.isatty())).run()


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


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a letter must not end an answer
    app()


if __name__ == "__main__":
    main()
