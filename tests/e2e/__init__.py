"""Real workers on real servers, as users run them.

What users ask for:

    test_celery_features     everything that a Celery user expects of a task
    test_asyncio             the same for asyncio programs
    test_chat_command        `petiole chat`
    test_batch               `petiole batch`: killed clients and workers, a full disk, bad rows
    test_batch_from_python   batches of tables and in `async for`, callers that stop, mistakes of all rows
    test_batch_trials        twenty thousand rows of a batch, each once, whoever dies
    test_detached_batch      `petiole batch --detach`: the workers run it, whoever dies
    test_two_apps            chains and chords of a team's own app and Petiole's
    test_one_process         the same with threads, greenlets and forks, and each version of Celery
    test_foreign_tasks       tasks of the same app that are no generations
    test_exporter            `petiole metrics`, scraped
    test_doctor              `petiole doctor`: each fault of a real fleet is named
    test_fault_list          twelve faults: alert, panel and doctor name each, and nothing else
    test_stories             `petiole task`, `petiole replay`
    test_traces              one trace of a task, from its web request over dead workers to its reader
    test_scaling             from no worker to three and back; a new model takes over a queue
    test_steering            pause, resume, reload
    test_models              a task finds its workers by the name of their model
    test_gpt_oss             channels and end tokens of gpt-oss, on a small model
    test_homes               conversations stay where they began
    test_counting            counts are answered beside a full engine
    test_retention           tasks say how long they are kept
    test_no_silence          whoever waits in vain learns why
    test_result_marker       whoever looks for results in the wrong place learns where the fault is

With a real model:

    test_real_engine         the model that ships
    test_plan_command        what `petiole plan` says, a worker reports
    test_tools             tools and reasoning: results, streams, enforced calls
    test_tiny_tools        the small model that calls tools by itself, and the agent loops of the docs
    test_states              a model whose layers keep states
    test_text_options        options of chat templates and of special tokens
    test_adapters            adapters whose files change
    test_applications        the applications in examples/
    test_vision              skills of the small vision model
    test_sight               pictures in conversations, from clients of both interfaces
    test_embeddings          vectors of texts: results, streams, deaths, canvas
    test_outputs_of_tokens   what BGE-M3 makes of each token beside a vector
    test_texts_and_reloads   a task of texts is answered by one model
    test_hostile_models      folders that cannot be served
    test_images              the CPU image and the compose file, by podman: restrictions, password, tasks

What may go wrong:

    test_recovery            a worker ends in any way at any time
    test_command_rights      every command under its documented user of Redis
    test_completing          two workers find that a task has ended
    test_cut_connections     a connection is cut at any command that follows the end of a task
    test_refused_results     a result that the backend refuses
    test_stop_while_loading  a worker is stopped before it serves
    test_kv_tier             a conversation outlives its worker in the files of its machine
    test_limits              what is too big, too much or too full
    test_bad_input           what should not be in a queue
    test_control_commands    who may command a worker, and where its answers go
    test_discretion          no text of a user in the log
    test_damaged_broker      keys of the broker that somebody has written into
    test_runners             runners that are killed, outlive nothing, and open only what they may
    test_damaged_logs        keys of a task that somebody has written into
    test_named_faults        each fault has a figure that names it

Other servers:

    test_rabbitmq            RabbitMQ as broker
    test_scores              `rerank`, `score` and `classify`; embeddings, rerank and score over HTTP
    test_sentinel            a Redis that is watched by Sentinel
    test_rights              the Redis users of docs/access-lists.md, on each Redis
    test_security            a Redis over TLS; pickle
"""
