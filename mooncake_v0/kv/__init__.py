"""From a paged KV cache to bytes in the pool and back: layout, plan of a step, producer and consumer."""
