"""What is pure: no input, no output, no clock.

failures  what a client is told of an error: status, code, the field it is about
"""
