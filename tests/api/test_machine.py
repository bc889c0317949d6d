"""GET /v1/machine: for everybody; commands for whoever runs the server."""

from __future__ import annotations

from perilune.service.ports import Caller

from .conftest import Serve
from .fakes import FakeService


async def test_commands_are_for_admins(serve: Serve) -> None:
    keys = {"a": Caller("x", "admin"), "u": Caller("x", "read-only")}
    async with serve(FakeService(keys=keys)) as server:
        for key, fix in (("a", "perilune kv rm --all"), ("u", "")):
            found = await server.http.get("/v1/machine", headers={"Authorization": f"Bearer {key}"})
            shown = await found.json()
            assert (shown["object"], shown["warnings"]) == ("machine", ["Disk: little"])
            assert shown["checks"][0]["fix"] == fix
        assert (await server.http.get("/v1/machine")).status == 401
