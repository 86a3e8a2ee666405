"""`POST /rose/v1/generate` as a bare ASGI application: this is the path of every turn."""

import msgspec
from starlette.types import Receive, Scope, Send

from rose.decoding import decoded
from rose.replica.admission import Admission
from rose.replica.asgi import BodyTooLargeError, ClientGoneError, read_body, refuse
from rose.replica.turns import Turns
from rose.replica.wire import MAX_BODY_BYTES, GenerateBody

_BODY = msgspec.json.Decoder(GenerateBody)


class GenerateApp:
    """Admits a turn and serves it; `turns` is set once the engine is up."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.turns: Turns | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        del scope
        try:
            body = decoded(_BODY, await read_body(receive, MAX_BODY_BYTES))
        except ClientGoneError:
            # Nothing was begun and nobody is left to tell.
            return
        except BodyTooLargeError as error:
            await refuse(send, 413, "too_large", str(error))
            return
        except msgspec.MsgspecError as error:
            await refuse(send, 400, "bad_request", str(error))
            return
        # Nothing is awaited from here until the turn is open: no drain can fall in between.
        if not self._admission.open or self.turns is None:
            await refuse(send, 503, "draining", f"no turns now: {self._admission.reason}")
            return
        await self.turns.serve(self.turns.open(body), receive, send)
