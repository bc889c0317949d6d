"""What runs here and how it is: models, backends, the machine, KV, health and metrics."""

from __future__ import annotations

from dataclasses import fields

from perilune.api.operations.table import (
    COUNT,
    NUMBER,
    OBJECT,
    TEXT,
    WHOLE,
    YES,
    Operation,
    Query,
    Schema,
    fields_of,
    listed,
    many,
    one_of,
    or_null,
    ref,
    shape,
    thing,
)
from perilune.engine.attention_debug import DebugSummary, StepFigures
from perilune.engine.kv_tally import KVTally
from perilune.engine.pressure import KVUse
from perilune.runtime.kv.spec import TierSpec
from perilune.service.checks import Check
from perilune.service.kv_health import PARTS, Finding

_SAID = {"level", "warm_compression"}
_BYTES = {each.name: NUMBER for each in fields(KVUse) if each.name not in _SAID}

SCHEMAS: dict[str, Schema] = {
    "Model": thing(
        "model",
        id=TEXT,
        created=WHOLE,
        owned_by={"const": "perilune"},
        max_model_len=COUNT,
        licence=or_null(TEXT),
    ),
    "Balance": shape(
        code={"const": 0},
        data=shape(available_balance=NUMBER, voucher_balance=NUMBER, cash_balance=NUMBER),
        scode={"const": "0x0"},
        status={"const": True},
        perilune=shape(budget=or_null(NUMBER), spent=NUMBER),
    ),
    "Backend": shape(
        name=TEXT,
        model=TEXT,
        serves=or_null(TEXT),
        available=YES,
        reason=or_null(TEXT),
        back_in_s=NUMBER,
        in_flight=COUNT,
        max_concurrency=or_null(COUNT),
        window_tokens=or_null(COUNT),
        claimed_window_tokens=or_null(COUNT),
        ttft_s=NUMBER,
        ttft_s_per_token=NUMBER,
    ),
    "Machine": thing(
        "machine",
        version=TEXT,
        model=shape(
            id=TEXT,
            parameters=COUNT,
            window_tokens=COUNT,
            languages=many(TEXT),
            licence=or_null(TEXT),
            bytes=COUNT,
            runtime=TEXT,
        ),
        cores=COUNT,
        memory=shape(total_bytes=COUNT, free_bytes=COUNT, model_bytes=COUNT, kv_bytes=COUNT, kv_tokens=COUNT),
        fit=one_of("ok", "tight"),
        rates=shape(
            measured=YES, prefill_tokens_per_s=NUMBER, decode_tokens_per_s=NUMBER, tokens_within_deadline=COUNT
        ),
        kernels=shape(path=TEXT, native=YES),
        warnings=many(TEXT),
        checks=many(shape(**fields_of(Check))),
    ),
    "KVHealth": shape(
        pressure=one_of("green", "yellow", "orange", "red"),
        kv=shape(
            **_BYTES,
            resident_bytes=COUNT,
            limit_share=NUMBER,
            warm_compression_ratio=or_null(NUMBER),
            bf16_over_warm=or_null(NUMBER),
        ),
        tiers=or_null(shape(**fields_of(TierSpec))),
        counts=shape(**fields_of(KVTally)),
        attention_debug=shape(
            on=YES,
            summary=or_null(shape(**fields_of(DebugSummary), **{f"{part}_share": NUMBER for part in PARTS})),
            steps=many(shape(**fields_of(StepFigures))),
        ),
        answers=shape(known=COUNT, cut=COUNT),
        findings=many(shape(**fields_of(Finding))),
    ),
}

_STATUS = shape(status=TEXT)
_STEPS = Query("steps", {"type": "integer", "minimum": 0, "maximum": 256})

OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/v1/models", "What can be asked", listed(ref("Model")), fails=()),
    Operation("GET", "/v1/models/{model}", "A model", ref("Model")),
    Operation(
        "GET",
        "/v1/users/me/balance",
        "What a key may still spend, in Moonshot's dialect",
        ref("Balance"),
        fails=(),
    ),
    Operation("GET", "/v1/backends", "Backends and their state", listed(ref("Backend")), fails=()),
    Operation("GET", "/v1/machine", "What this machine offers", ref("Machine"), fails=()),
    Operation("GET", "/v1/kv/health", "KV and attention", ref("KVHealth"), queries=(_STEPS,), fails=()),
    Operation("PUT", "/v1/kv/attention_debug", "Measure decode steps, or stop", shape(on=YES), fails=()),
    Operation("GET", "/health", "Whether the process answers", _STATUS, fails=(), open=True),
    Operation("GET", "/ready", "Whether it can be asked", _STATUS, fails=(), busy=_STATUS, open=True),
    Operation("GET", "/version", "The version", shape(version=TEXT), fails=(), open=True),
    Operation("GET", "/openapi.json", "This document", OBJECT, fails=(), open=True),
    Operation("GET", "/metrics", "Prometheus' metrics", texts=("text/plain",), fails=()),
)
