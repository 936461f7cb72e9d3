"""The server of this machine's own pages: what a Ctrl-C does that comes before it answers anybody."""

import asyncio
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from ddm.pages.serving import listening, run_server, server_of


def test_interrupt_before_a_page_is_served_ends_it_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio.Runner, "run", interrupted)

    def warned(serve: Callable[[Any, Any], None]) -> list[str]:
        with (
            warnings.catch_warnings(record=True) as caught,
            listening("127.0.0.1", 0) as (listener, _),
        ):
            warnings.simplefilter("always")
            with pytest.raises(KeyboardInterrupt):
                serve(server_of(PlainTextResponse("here")), listener)
            gc.collect()
        return [str(warning.message) for warning in caught]

    assert warned(run_server) == []
    assert "never awaited" in warned(lambda server, listener: server.run(sockets=[listener]))[0], (
        "control"
    )
