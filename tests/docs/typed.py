"""A command as a reader types it: `python -m tests.docs.typed PROGRAM… -- ARGUMENTS…`.

Where a page writes FILE_ID or KEY_ID, a reader puts in the id that he has just seen. So ids in the output of each
command are kept in `$DOCS_SEEN`, and stand in for such names in the next ones. Answers are kept short.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

IDS = {
    "FILE_ID": r'(?<!file_id":")\bfile-[\w-]{8,}(?!.*"purpose":"batch)',
    "INPUT_ID": r'\bfile-[\w-]{8,}(?=.*"purpose":"batch")',
    "BATCH_ID": r"\bbatch_(?!req)[\w-]{8,}",
    "UPLOAD_ID": r"\bupload_[\w-]{8,}",
    "PART_ID": r"\bpart_[\w-]{8,}",
    "FEEDBACK_ID": r"\bfeedback_[\w-]{8,}",
    "ANSWER_ID": r"\bchatcmpl-[\w-]{8,}",
    "KEY_ID": r"\bkey-[0-9a-f]{8,}",
    "NEXT_CURSOR": r'(?<="next_cursor":")[^"]+',
}
"""What pages write, and what it stands for."""

SHORT = ["--max-tokens", "24"]


def filled(argument: str, seen: dict[str, str]) -> str:
    return re.sub(r"\b[A-Z_]{3,}\b", lambda name: seen.get(name[0], name[0]), argument)


def remember(output: str, seen: dict[str, str]) -> None:
    for name, shape in IDS.items():
        found = re.findall(shape, output)
        if found:
            seen[name] = found[0]  # lists begin with the newest


def main() -> int:
    border = sys.argv.index("--")
    program, arguments = sys.argv[1:border], sys.argv[border + 1 :]
    kept = Path(os.environ["DOCS_SEEN"])
    seen: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
    arguments = [filled(each, seen) for each in arguments]
    if "ask" in arguments and "--max-tokens" not in arguments:
        arguments += SHORT
    done = subprocess.run([*program, *arguments], stdout=subprocess.PIPE)
    sys.stdout.buffer.write(done.stdout)
    remember(done.stdout.decode(errors="replace"), seen)
    kept.write_text(json.dumps(seen))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
