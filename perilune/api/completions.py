"""POST /v1/completions: prompts that come as they are (OpenAI's Completions).

Knows the dialect: request, whole answer and chunks. A request may hold several prompts; they are answered one after
the other, and their answers are choices in the order of the prompts. The `perilune` object is the last one's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from perilune.api import errors, sse
from perilune.api.chat import ChatCompletions
from perilune.api.completion import fingerprint, finish_reason, finite, progress_bytes, unfinished, usage_dict
from perilune.api.dialect import Dialect
from perilune.api.fields import check_fields, ignored_fields
from perilune.api.limits import parse_json_object
from perilune.api.responses_request import validated
from perilune.api.schema import (
    MAX_CHOICES,
    MAX_DEADLINE_S,
    MAX_OUTPUT_TOKENS,
    TIER_OF_CLASS,
    ChatCall,
    ModelName,
    Stops,
    WireStreamOptions,
    as_list,
    logit_bias_of,
    service_class,
)
from perilune.api.wire import Wire
from perilune.config import Settings
from perilune.core import (
    Admitted,
    ChoiceFinished,
    Completed,
    DecodedLogprob,
    Event,
    FileSearched,
    FileSearchStarted,
    RawPrompt,
    ReasoningDelta,
    Request,
    SamplingParams,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from perilune.errors import InvalidRequest, PeriluneError
from perilune.service.ports import Caller
from perilune.service.report import report_dict

MAX_PROMPTS = 64
MAX_PROMPT_TOKENS = 4_000_000
_INT64 = 2**63 - 1

Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]


class WireCompletion(Wire):
    """The body of POST /v1/completions."""

    model: ModelName
    prompt: Annotated[str, Field(min_length=1)] | Texts | Ids | Prompts
    max_tokens: int | None = Field(None, ge=0, le=MAX_OUTPUT_TOKENS)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    stop: Annotated[Stops | None, BeforeValidator(as_list, json_schema_input_type=str | Stops | None)] = None
    seed: int | None = Field(None, ge=-_INT64 - 1, le=_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: WireStreamOptions | None = None
    service_tier: str | None = Field(None, max_length=64)
    deadline_s: float | None = Field(None, gt=0, le=MAX_DEADLINE_S)


@dataclass(frozen=True, slots=True)
class CompletionCall(ChatCall):
    """`requests` are the prompts', `request` is the first with the choices of all."""

    requests: tuple[Request, ...] = ()


def parse_completion(
    body: bytes, *, request_id: str, caller: Caller, arrival_s: float, settings: Settings
) -> CompletionCall:
    """See `dialect.Parse`."""
    raw = parse_json_object(body)
    check_fields("completions", raw)
    wire = validated(WireCompletion, raw)
    _check(wire)
    n = wire.n or 1
    prompts = _prompts(wire)
    if n * len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"A request may ask for at most {MAX_PROMPTS} answers.", param="n")
    options = wire.stream_options or WireStreamOptions()
    first = Request(
        request_id=request_id,
        tenant=caller.tenant,
        model=wire.model,
        messages=(),
        arrival_s=arrival_s,
        sampling=_sampling(wire, settings.model.temperature),
        n=n,
        deadline_s=wire.deadline_s or caller.deadline_s,
        service_class=service_class(wire.service_tier),
        whole=not wire.stream,
        key_id=caller.key_id,
        limits=caller.limits,
        raw=prompts[0],
    )
    requests = tuple(
        replace(first, request_id=f"{request_id}-p{index}" if index else request_id, raw=prompt)
        for index, prompt in enumerate(prompts)
    )
    return CompletionCall(
        replace(first, n=n * len(prompts)),
        bool(wire.stream),
        bool(options.include_usage),
        bool(options.include_progress),
        ignored=ignored_fields(raw, WireCompletion.model_fields, "completions"),
        requests=requests,
    )


def _check(wire: WireCompletion) -> None:
    """Raises `InvalidRequest` for fields that don't go together."""
    if wire.best_of is not None and wire.best_of < (wire.n or 1):
        raise InvalidRequest("best_of is less than n.", hint="Send a larger one, or none.", param="best_of")
    if wire.best_of is not None and wire.best_of > (wire.n or 1) and wire.stream:
        raise InvalidRequest("best_of can't be streamed.", hint="Leave out stream.", param="best_of")
    if wire.echo and wire.logprobs is not None:
        raise InvalidRequest(
            "Log probabilities of a prompt aren't computed, so echo and logprobs don't go together.",
            hint="Leave out one of them.",
            param="echo",
        )
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")


def _prompts(wire: WireCompletion) -> list[RawPrompt]:
    given: Sequence[Any] = wire.prompt if isinstance(wire.prompt, list) else [wire.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    best_of = wire.best_of or 1
    return [
        RawPrompt(each, (), bool(wire.echo), best_of)
        if isinstance(each, str)
        else RawPrompt(None, tuple(each), bool(wire.echo), best_of)
        for each in given
    ]


def _sampling(wire: WireCompletion, temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature if wire.temperature is None else float(wire.temperature),
        top_p=1.0 if wire.top_p is None else max(float(wire.top_p), 1e-6),
        top_k=max(wire.top_k or 0, 0),
        min_p=float(wire.min_p or 0.0),
        presence_penalty=float(wire.presence_penalty or 0.0),
        frequency_penalty=float(wire.frequency_penalty or 0.0),
        repetition_penalty=1.0 if wire.repetition_penalty is None else float(wire.repetition_penalty),
        seed=wire.seed,
        logit_bias=logit_bias_of(wire.logit_bias or {}),
        logprobs=wire.logprobs,
        max_tokens=wire.max_tokens,
        stop=tuple(wire.stop or ()),
        ignore_eos=bool(wire.ignore_eos),
    )


# ------------------------------------------------------------------------------------------------------ answers


class _Choice:
    """How far an answer's text is: what `text_offset` counts."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.logprobs: list[DecodedLogprob] = []
        self.reason: str | None = None
        self.chars = 0

    def offsets(self, tokens: Sequence[DecodedLogprob]) -> list[int]:
        found = []
        for token in tokens:
            found.append(self.chars)
            self.chars += len(token.token)
        return found


class _Answer:
    def __init__(self, call: ChatCall, created_at: int) -> None:
        request = call.request
        self._call = call
        self._wants_logprobs = request.sampling.logprobs is not None
        self._choices = [_Choice() for _ in range(request.n)]
        self._base: dict[str, Any] = {
            "id": "cmpl-" + request.request_id.removeprefix("req_"),
            "object": "text_completion",
            "created": created_at,
            "model": request.model,
            "system_fingerprint": fingerprint(request.model),
            "service_tier": TIER_OF_CLASS[request.service_class],
        }

    def _choice(
        self, index: int, text: str, tokens: Sequence[DecodedLogprob], reason: str | None
    ) -> dict[str, Any]:
        shown = logprobs_dict(tokens, self._choices[index].offsets(tokens)) if self._wants_logprobs else None
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}


def logprobs_dict(tokens: Sequence[DecodedLogprob], offsets: Sequence[int]) -> dict[str, Any]:
    """The dialect's older form, four lists."""
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {text: finite(value) for text, _, value in token.top} or {token.token: finite(token.logprob)}
            for token in tokens
        ],
        "text_offset": list(offsets),
    }


class WholeCompletion(_Answer):
    """Collects events into one `text_completion` body."""

    def __init__(self, call: ChatCall, created_at: int) -> None:
        super().__init__(call, created_at)
        self._end: Completed | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._choices[event.choice].text.append(event.text)
            self._choices[event.choice].logprobs += event.logprobs
        elif isinstance(event, ChoiceFinished):
            self._choices[event.choice].reason = finish_reason(event)
        elif isinstance(event, Completed):
            self._end = event

    def body(self) -> dict[str, Any]:
        """Raises `InternalError` when the service ended without saying that it completed."""
        if self._end is None:
            raise unfinished()
        choices = [
            self._choice(index, "".join(choice.text), choice.logprobs, choice.reason)
            for index, choice in enumerate(self._choices)
        ]
        return {
            **self._base,
            "choices": choices,
            "usage": usage_dict(self._end.usage),
            "perilune": report_dict(self._end.report),
        }


class StreamedCompletion(_Answer):
    """Turns events into `text_completion` chunks."""

    def __init__(self, call: ChatCall, created_at: int) -> None:
        super().__init__(call, created_at)
        if call.include_usage:
            self._base["usage"] = None
        self._completed = False

    def opening(self) -> bytes:
        return b""

    def encode(self, event: Event) -> bytes:
        match event:
            case TextDelta(choice=index, text=text, logprobs=tokens):
                return self._chunk([self._choice(index, text, tokens, None)]) if text or tokens else b""
            case ChoiceFinished():
                return self._chunk([self._choice(event.choice, "", (), finish_reason(event))])
            case Completed():
                return self._end(event)
            case Admitted() | ReasoningDelta() | ToolCallDelta() | FileSearchStarted() | FileSearched():
                return b""
            case _:
                return progress_bytes(event, self._base, self._call.include_progress)

    def end(self) -> bytes:
        """Raises `InternalError` when the service ended without saying that it completed."""
        if not self._completed:
            raise unfinished()
        return sse.DONE

    def _end(self, event: Completed) -> bytes:
        self._completed = True
        out = self._chunk([], perilune=report_dict(event.report))
        if self._call.include_usage:
            out += self._chunk([], usage=usage_dict(event.usage))
        return out

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse.data({**self._base, "choices": choices, **more})


def _error_event(error: PeriluneError) -> bytes:
    return sse.data(errors.body(error))


COMPLETIONS = Dialect(parse_completion, WholeCompletion, StreamedCompletion, _error_event)


class CreateCompletion(ChatCompletions):
    """The endpoint."""

    def _events(self, call: ChatCall) -> aclosing[AsyncGenerator[Event]]:
        assert isinstance(call, CompletionCall)
        return aclosing(self._one_by_one(call))

    async def _one_by_one(self, call: CompletionCall) -> AsyncGenerator[Event]:
        spent = Usage(0, 0, 0)
        for index, request in enumerate(call.requests):
            first = index * request.n
            async with self._run(request) as events:
                async for event in events:
                    if isinstance(event, TextDelta | ChoiceFinished):
                        yield replace(event, choice=first + event.choice)
                    elif isinstance(event, Completed):
                        spent = _sum(spent, event.usage)
                        if index == len(call.requests) - 1:
                            yield replace(event, usage=spent)
                    elif not index or not isinstance(event, Admitted):
                        yield event


def _sum(first: Usage, second: Usage) -> Usage:
    return Usage(
        first.prompt_tokens + second.prompt_tokens,
        first.completion_tokens + second.completion_tokens,
        first.cached_tokens + second.cached_tokens,
    )
