"""Streams, events, transfers and slots. Called by all of `runtime`.

device    what a device, a stream and an event are; copies to a device
cpu       a stream as an executor with a thread of its own
cuda      CUDA's streams and events
opening   opens the device that the configuration names
transfer  copies of a step's outputs to the host; the two slots: what the next step must not overwrite
tracing   timelines of host and device, as Chrome shows them
"""
