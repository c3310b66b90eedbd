"""The outgoing half of the streams. Called by `generation`; `broker` ends the streams of bad messages.

publisher  the thread that writes all changed streams, one script call a flush; sees that nobody reads one any more
wire       deltas as JSON
outcomes   how a generation ended, as results and records have it; which error a caller gets
lua/       publish: appends for the attempt that owns the task; its last append finishes the stream, once;
           close: ends the stream of a refused message
"""
