"""ONNX Runtime GenAI: prompts of a turn that are equally long are one batch.

Its generator takes batches of one length. A turn with several lengths is answered length by length,
all of whose requests were sent at the beginning of the turn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turns import Answer, Ask, Clocked, answer_turns


def open_engine(options: dict[str, Any]) -> tuple[Ask, dict[str, Any]]:
    import onnxruntime_genai as genai

    set_threads(Path(options["converted"]) / "genai_config.json", options["threads"])
    model = genai.Model(options["converted"])

    def ask(prompts: list[list[int]], output_len: int) -> list[Answer]:
        requests = [Clocked() for _ in prompts]
        for batch in by_length(prompts):
            params = genai.GeneratorParams(model)
            length = len(prompts[batch[0]]) + output_len
            params.set_search_options(
                batch_size=len(batch), max_length=length, min_length=length, do_sample=False
            )
            generator = genai.Generator(model, params)
            generator.append_tokens([prompts[index] for index in batch])
            for _ in range(output_len):
                generator.generate_next_token()
                for index, token in zip(batch, generator.get_next_tokens(), strict=True):
                    requests[index].take([int(token)])
        return [request.answer for request in requests]

    return ask, {"dtype": options["weights"]}


def by_length(prompts: list[list[int]]) -> list[list[int]]:
    """Indexes of prompts that are equally long, in the order of the first of each."""
    batches: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        batches.setdefault(len(prompt), []).append(index)
    return list(batches.values())


def set_threads(config: Path, threads: int) -> None:
    """Write the number of threads into a model's configuration."""
    settings = json.loads(config.read_text())
    session = settings["model"]["decoder"].setdefault("session_options", {})
    session["intra_op_num_threads"] = threads
    config.write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    answer_turns(open_engine)
