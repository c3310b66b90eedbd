"""`petiole ...` on the command line. Nothing imports these rooms, except that an application's tests use
`testing`.

cli           the arguments, and each command, such as status (STATUS_COLUMNS, _status_row). A new one goes here
conversation  `petiole chat`: a conversation in the terminal
demo          `petiole demo`: an embedded Redis, a worker and eight streams
terminal      tables and live views, with or without rich
vision_demo   `petiole demo --vision`: questions about a picture, and the picture with the answers drawn in
testing       an embedded Redis and a worker, for an application's own tests
"""
