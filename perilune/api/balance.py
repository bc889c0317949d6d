"""GET /v1/users/me/balance: what a key may still spend, as Moonshot's API has it.

Knows the shape; the ledger knows the numbers. Vouchers there are none, so all of it is cash.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from perilune.api.auth import caller_of
from perilune.api.wire import json_response
from perilune.service.ports import ServiceApi

UNLIMITED = 1e9
"""What a key without a budget may spend: clients compare a number with zero."""


class Balances:
    """The endpoint."""

    def __init__(self, service: ServiceApi) -> None:
        self._service = service

    async def read(self, request: Request) -> Response:
        """In the unit of the backends' prices, of this UTC month; the local model costs nothing."""
        found = await self._service.balance(caller_of(request.scope))
        left = UNLIMITED if found.budget is None else round(found.budget - found.spent, 5)
        data = {"available_balance": left, "voucher_balance": 0.0, "cash_balance": left}
        known = {"budget": found.budget, "spent": round(found.spent, 5)}
        return json_response({"code": 0, "data": data, "scode": "0x0", "status": True, "perilune": known})
