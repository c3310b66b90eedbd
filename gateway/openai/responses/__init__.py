"""OpenAI's Responses: another view of the same core, and what makes a response an object: it is kept, continued,
cancelled and read again, by any gateway.

A *turn* is what one request has told and got: its input items, and its output items. A response is a turn, and so
are items that were put into a conversation. What comes before a turn is a list of turns (`before`), whether they
are joined by `previous_response_id` or by a conversation.

websocket           the same over a WebSocket
conversations       the handlers of /conversations
submitting          from a request to a generation
conversation_store  turns and conversations in Redis
request             the request of a response: a plan
view                the answer as events
resource            the answer as an object
tools               tools as clients write them, and as a task takes them
items               items as clients write them, as they are kept, and as messages of a task
compaction          a dialogue made short
store               values as JSON and lists that grow, in Redis: what all of these keep
"""
