"""llama.cpp through its C interface: all prompts of a turn are sequences of one batch.

The package's own `Llama` answers one request at a time. This follows llama.cpp's example of batched
generation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turns import Answer, Ask, Clocked, answer_turns


def open_engine(options: dict[str, Any]) -> tuple[Ask, dict[str, Any]]:
    import llama_cpp

    llama_cpp.llama_backend_init()
    parameters, left_out = model_parameters(llama_cpp, Path("/proc/cpuinfo").read_text())
    model = llama_cpp.llama_model_load_from_file(options["converted"].encode(), parameters)
    if not model:
        raise RuntimeError(f"{options['converted']} could not be loaded")
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = options["kv_tokens"]
    settings.n_batch = settings.n_ubatch = 512
    settings.n_seq_max = options["max_num_seqs"]
    settings.n_threads = settings.n_threads_batch = options["threads"]
    # One cache for all sequences, instead of an equal part for each.
    settings.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("no context")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    return Batched(context, settings.n_batch, vocab_size).ask, {
        "dtype": options["weights"] + left_out
    }


def model_parameters(llama_cpp: Any, cpuinfo: str) -> tuple[Any, str]:
    """Parameters to load a model with, and what they leave out, for the table.

    On CPUs with AMX a build by GCC 12 crashes: the compiler drops the configuration of tiles. So
    weights are not put into the buffers that AMX multiplies there, nor into rearranged ones, which
    one switch decides.
    """
    parameters = llama_cpp.llama_model_default_params()
    if "amx_tile" not in cpuinfo:
        return parameters, ""
    if not hasattr(parameters, "use_extra_bufts"):
        raise RuntimeError("this version cannot be kept from using AMX")
    parameters.use_extra_bufts = False
    return parameters, ", without AMX and rearranged weights"


class Batched:
    """Decodes many sequences greedily, at most ``limit`` tokens at a time."""

    def __init__(self, context: Any, limit: int, vocab_size: int) -> None:
        import llama_cpp

        self._context = context
        self._limit = limit
        self._vocab_size = vocab_size
        self._batch = llama_cpp.llama_batch_init(limit, 0, 1)

    def ask(self, prompts: list[list[int]], output_len: int) -> list[Answer]:
        import llama_cpp

        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        requests = [Clocked() for _ in prompts]
        # (token, position, sequence, whether to sample the next token)
        work = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        while work:
            part, work = work[: self._limit], work[self._limit :]
            found = self._decode(part)
            for sequence, token in found:
                request = requests[sequence]
                request.take([token])
                if len(request.tokens) < output_len:
                    position = len(prompts[sequence]) + len(request.tokens) - 1
                    work.append((token, position, sequence, True))
        return [request.answer for request in requests]

    def _decode(self, part: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """(sequence, its next token) for the entries that sample."""
        import llama_cpp
        import numpy

        batch = self._batch
        batch.n_tokens = len(part)
        for index, (token, position, sequence, asks) in enumerate(part):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = asks
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        found = []
        for index, (_, _, sequence, asks) in enumerate(part):
            if asks:
                logits = llama_cpp.llama_get_logits_ith(self._context, index)
                row = numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,))
                found.append((sequence, int(row.argmax())))
        return found


if __name__ == "__main__":
    answer_turns(open_engine)
