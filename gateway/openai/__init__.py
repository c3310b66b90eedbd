"""OpenAI's interface. A new one of its endpoints begins as `chat`: a model of the request, which makes a plan; a
view, which makes events and the whole answer; a handler in `gateway.routes`.

responses/        responses and conversations: kept, continued, cancelled, over HTTP and WebSockets
chat              the request of chat/completions: a plan
chat_view         its answer, streamed and whole
completions       the request of completions: a plan
completions_view  its answer, streamed and whole
tokenization      vLLM's tokenize and detokenize
model_list        the models of the fleet as OpenAI lists them
sampling_options  the parameters that all kinds of generation share, and what they are called in a task
conversation      messages and tools as clients write them, as a task takes them
response_format   response_format and structured_outputs: the output's constraint
logprobs          tokens with their log-probabilities, as OpenAI shows them
answers           what all answers share: usage, finish reasons, errors, ids; lists in pages
"""
