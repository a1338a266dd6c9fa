"""The metadata service: stores (`open_store`), the HTTP gateway, the registry of instances, and what inspects them."""
