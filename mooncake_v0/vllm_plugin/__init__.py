"""vllm_plugin"""
