"""The outgoing half of the streams. Called by `generation`; `broker` ends the streams of bad messages.

publisher  the thread that writes all changed streams, with one script call for each flush; notices streams without
           a reader
outcomes   how a generation ended, in results and in records; the error that a caller gets
"""
