"""OpenVINO GenAI's continuous batching."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from turns import Answer, Ask, Clocked, answer_turns


def open_engine(options: dict[str, Any]) -> tuple[Ask, dict[str, Any]]:
    import numpy
    import openvino
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

    scheduling = SchedulerConfig()
    # In whole GiB.
    scheduling.cache_size = max(1, options["kv_bytes"] >> 30)
    scheduling.max_num_seqs = options["max_num_seqs"]
    scheduling.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": options["threads"], "CACHE_DIR": options["cache"]}
    pipeline = ContinuousBatchingPipeline(Path(options["converted"]), scheduling, "CPU", properties)
    numbers = itertools.count()

    def ask(prompts: list[list[int]], output_len: int) -> list[Answer]:
        settings = GenerationConfig()
        settings.max_new_tokens = output_len
        settings.ignore_eos = True
        settings.do_sample = False
        requests = []
        for prompt in prompts:
            ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            request = Clocked()
            requests.append((request, pipeline.add_request(next(numbers), ids, settings)))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for request, handle in requests:
                while handle.can_read():
                    for output in handle.read().values():
                        request.take(list(output.generated_ids))
        return [request.answer for request, _ in requests]

    return ask, {"dtype": options["weights"]}


if __name__ == "__main__":
    answer_turns(open_engine)
