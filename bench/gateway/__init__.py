"""Over HTTP.

__main__  `python -m bench.gateway`
direct    `petiole serve` in turns with direct reading of the same streams
page      the gateway's page in Chromium
proxied   beside proxies before model servers
keyed     what keys, limits and the ledger of usage add
served    a running gateway, and a client that does no more than it must
"""
