"""Programs of SDKs of others, as clients of a real gateway: `make sdks` installs the SDKs, beside the project's
own environment, and `tests/gateway/test_sdks.py` runs the programs.

    with_NAME.py, with_NAME.mjs   a program of one SDK: `python with_litellm.py URL`. It fails, or prints `fine`
    tools_with_NAME.py            the same, of a model with tools
"""
