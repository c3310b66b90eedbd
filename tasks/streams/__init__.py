"""Reading the stream of a task. Applications call `definitions`; tasks make `readers`; the other modules are their
parts.

api                  `stream`, `sse`, `end` and their forms for asyncio: cheap to import
events               a stream as server-sent events
ends                 how a task has ended, from its state
callback_reader      a reader that hands deltas on where they arrive, for whoever follows many streams
readers              the protocol over redis-py, blocking and with asyncio; the result objects of tasks
presentation         deltas with reasoning, content and calls of tools
protocol             the protocol itself, without input or output: subscribe, read the log, follow, read again
assembly             log and channel merged: every token once, in order
polling              the looks of silent streams, together
subscriptions        pub/sub connections that are reused
async_subscriptions  one pub/sub connection for all readers of an event loop
"""
