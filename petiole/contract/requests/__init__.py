"""What may be asked for. A new option is declared here: `python -m docs.render` writes the rest.

From `delay` to the engine a request passes four checks, and each alone checks something:

1. Submission: `wire.headers.check_submission` checks Celery's options, such as `countdown`;
   `validation.validate` checks the task's options, so that the caller learns at once what is wrong.
2. Gate (`worker/broker/gate`): checks that the message is well-formed, so that nothing in it ends a worker.
3. Intake: `validation.validate` again, because a message may come from another version, from `send_task` or from
   a chain.
4. Preparation (`gpu_worker/preparation`): checks the limits that only the model has, such as vocabulary, context,
   pages and template. An engine may be used without Celery, so preparation calls `validation.validate`, too.

count            request and result of `count`
image_tasks      requests to a vision model: query, caption, point, detect
embedding_tasks  embed, and what models of texts do beside it: rerank, score, classify
generation       requests of `generate` and `chat`
sampling         `SamplingParams`: the options of sampling, for these requests and for the engine
validation       how every request is validated
tool_choice      which tools a conversation may call
images           an image or a video in a request: base64, a data URL, a handle, or a list of frames
submission       the options of Celery that `delay` takes, such as `priority`
bounds           what a request may cost before it is understood: values, entries, names
"""
