"""`petiole ...` on the command line. Nothing imports these rooms, but an application's tests `testing`.

cli           the arguments, and each command, such as status (STATUS_COLUMNS, _status_row). A new one goes here
conversation  `petiole chat`: a conversation in the terminal
demo          `petiole demo`: an embedded Redis, a worker and eight streams
terminal      tables and live views, with or without rich
vision_demo   `petiole demo --vision`: a picture, questions about it, and what was found drawn in
testing       an embedded Redis and a worker, for an application's own tests
"""
