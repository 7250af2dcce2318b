"""The verifier composed with a restorer, without an engine: for who drives sessions step by step.

An engine that was given a latent codec composes the same two. There is one `Verifier`; what comes back for evicted rows
is a matter of the `KVContext` that its sessions live in.
"""

from __future__ import annotations

from dataclasses import replace

from inference_engine.backends.base import Forward
from inference_engine.decode.verifier import Verifier
from inference_engine.kv.context import KVContext
from inference_engine.kv.latent_rows import Latent
from inference_engine.kv.token_codec import TokenCodec


def DLMRestoredVerifier(forward: Forward, context: KVContext, codec: TokenCodec) -> Verifier:
    """A verifier whose sessions may have their evicted rows restored from `codec`'s latents, to be held or streamed.

    Open them as `SessionKV` of strategy `restored` in the verifier's `context`, not in the one that was given. Raises
    InvalidArgument if the codec was made for other layers.
    """
    restoring = replace(context, latent=codec)
    Latent(codec.bytes_per_token).ready(restoring)
    return Verifier(forward, restoring)
