"""llm, as it comes: models of `extra-openai-models.yaml`, by its command line and (quicker) its Python API.

It can't force a call, so the prompt asks for one word by word; the model copies it, and the tool runs.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import proof
from proof import BUSY_KEY, CITY, KEY, LONG, LONGEST, MODEL, QUESTION, TOKENS, URL

HOME = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(HOME)
_usual = {"model_name": MODEL, "api_base": f"{URL}/v1", "supports_schema": True, "supports_tools": True}
_models = [
    {**_usual, "model_id": "perilune", "api_key_name": "perilune"},
    {**_usual, "model_id": "perilune-busy", "api_key_name": "busy"},
    {**_usual, "model_id": "perilune-responses", "api_key_name": "perilune", "responses": True},
]
(HOME / "extra-openai-models.yaml").write_text(json.dumps(_models))  # JSON is YAML
(HOME / "keys.json").write_text(json.dumps({"perilune": KEY, "busy": BUSY_KEY}))

import llm  # noqa: E402 - it reads the folder when it is imported

LLM = str(Path(sys.executable).parent / "llm")
SHORT = {"max_tokens": TOKENS, "temperature": 0}
LONGER = {"max_tokens": 200, "temperature": 0}


def weather(city: str) -> str:
    """Weather."""
    return f"{city}: rain"


def _usage(response):
    usage = response.usage()
    return {"prompt_tokens": usage.input, "completion_tokens": usage.output}


def plain():
    """By the command line, whose usage goes to stderr."""
    words = ["-m", "perilune", "--no-stream", "-u", "-o", "max_tokens", str(TOKENS), "-o", "temperature", "0"]
    done = subprocess.run([LLM, *words, QUESTION], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = re.search(r"Token usage: ([\d,]+) input, ([\d,]+) output", done.stderr)
    assert found is not None, done.stderr
    usage = {"prompt_tokens": int(found[1]), "completion_tokens": int(found[2])}
    return {"text": done.stdout.removesuffix("\n"), "usage": usage}


def stream():
    response = llm.get_model("perilune").prompt(QUESTION, **SHORT)
    texts = list(response)
    return {"text": "".join(texts), "pieces": len(texts), "usage": _usage(response)}


def _called(stream, *cities):
    calls = [
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in cities
    ]
    asked = "Answer with exactly this and nothing else:\n" + "\n".join(calls)
    response = llm.get_model("perilune").prompt(asked, tools=[weather], stream=stream, **LONGER)
    return response, [call.arguments for call in response.tool_calls()]


def tools():
    first, calls = _called(True, "Oslo")
    last = first.reply(tool_results=first.execute_tool_calls(), **SHORT)
    return {"calls": calls, "reason": "tool_calls", "text": last.text()}


def parallel():
    _, one = _called(True, "Oslo")
    return {
        "calls": _called(False, "Oslo", "Lima")[1],
        "streamed": _called(True, "Oslo", "Lima")[1],
        "one": len(one),
    }


def json_schema():
    return {"value": json.loads(llm.get_model("perilune").prompt(QUESTION, schema=CITY, **LONGER).text())}


def _begun(name, schema):
    pieces = iter(llm.get_model(name).prompt(QUESTION, schema=schema, max_tokens=4000))
    next(pieces)
    return pieces


def retry():
    first = _begun("perilune-busy", LONG)
    second = llm.get_model("perilune-busy").prompt(QUESTION, stream=False, **SHORT).text()
    first.close()
    return {"text": second}


def responses():
    model = llm.get_model("perilune-responses")
    done = model.prompt(QUESTION, **SHORT)
    text = done.text()
    value = json.loads(model.prompt(QUESTION, schema=CITY, **LONGER).text())
    return {"text": text, "usage": _usage(done), "value": value}


def cancel():
    """Ctrl-C on the command line; a closed iterator of the Python API leaves its connection open."""
    words = ["-m", "perilune", "--schema", json.dumps(LONGEST), "-o", "max_tokens", "6000", QUESTION]
    process = subprocess.Popen(
        [LLM, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    process.communicate()
    return {}


proof.run(
    {
        "plain": plain,
        "stream": stream,
        "tools": tools,
        "parallel": parallel,
        "json_schema": json_schema,
        "retry": retry,
        "responses": responses,
        "cancel": cancel,
    }
)
