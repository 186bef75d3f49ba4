"""Names of what a request computes: equal prefixes of equal names share KV."""

from __future__ import annotations

from src.core.request import Request
from src.engine.kv.hash_chain import HashChain, chain_root
from src.engine.scheduling.admission import SchedulerLimits
from src.engine.scheduling.request_state import RequestState


class ContentNames:
    """Makes the digests of requests' blocks."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._layout = limits.layout

    def chain_of(self, request: Request, sibling: RequestState | None) -> HashChain:
        """The digests of a request's blocks.

        With a ``sibling`` of the same prompt list object they share those of the prompt, unless
        their KV depends on different things.
        """
        limits, adapter = self._limits, request.adapter
        if (
            sibling is not None
            and sibling.request.prompt_token_ids is request.prompt_token_ids
            and sibling.request.cache_salt == request.cache_salt
            and sibling.request.tenant == request.tenant
            and sibling.request.adapter == adapter
            and sibling.request.media_keys == request.media_keys
        ):
            return sibling.chain.branch(len(request.prompt_token_ids))
        digest = b"" if adapter is None else adapter.digest
        tenant = "" if limits.share_prefixes else request.tenant
        root = chain_root(limits.content_key, self._layout, request.cache_salt, digest, tenant)
        return HashChain(limits.block_size, root, request.media_keys)
