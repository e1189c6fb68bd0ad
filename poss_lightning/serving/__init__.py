"""vLLM: a plugin that serves drafts, and features that vLLM computes (docs/serving.md)."""

TESTED = "0.32"  # the version of vLLM whose tests passed (make test-vllm)
