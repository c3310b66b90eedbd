"""Doubles and real servers for the tests.

    trials           which tests only `make test-all` runs
    nursery          workers and gateways of `make test` and `make trials`, forked by a process that has their
                     libraries
    outside          what the shell of a run has exported, and its tests must not see

A whole installation, and who uses it:

    wheels           distributions of this checkout, and bare environments for them
    site             a real redis-server, real workers, and a producer that sees what they do
    rabbitmq         a RabbitMQ of a test's own
    watched          a Redis with replicas and sentinels
    proxy            a proxy before a server, whose connections can be cut or made to hang
    memory_group     processes with a limit of memory, as in a container
    browser          Chromium, if there is one
    certificates     a CA, and a certificate for servers and clients
    client           a producer in a process of its own
    reader           a reader of a stream on a thread of its own
    issuer           an issuer of JSON Web Tokens, with its keys at a URL
    collector        a collector of OpenTelemetry's traces
    traced_app       a web app that is traced
    receiver         a tenant's server, which takes the notices of webhooks
    web_app          what a web app does with Petiole, in an environment with its own Celery
    faked            the tests of an application, with the fake worker
    django_faked     the same of a Django project with a worker of its own
    shop             a team's own Celery app, as it was before Petiole came
    both_apps        canvases of that app and Petiole's, in every order, and what each must give
    foreign_tasks    tasks of the same app that are no generations
    telltale_tasks   tasks whose results and errors have a user's text
    rights           the Redis users of docs/access-lists.md
    hostile          messages as no producer sends them
    reading          the names that code reads of a message
    parsing          Python's text as a tree, without a garbage collection meanwhile
    bodies           bodies of HTTP requests that are nearly right
    hostile_broadcasts  control commands and events as no Celery sends them
    scraping         `petiole metrics` as a process
    gateway          `petiole serve` as a process
    open_responses   the compliance suite of Open Responses, fetched where there is Node
    openai_schema    schemathesis on OpenAI's description of its interface, where there is both

Engines that a worker of a site may run, named by `PETIOLE_ENGINE_FACTORY`:

    fake_engine      makes its tokens up, without a model
    mortal_engine    dies
    scripted         a model that says what its question asks for
    doomed           ends its worker at one point on the way of a message
    cutting          loses its connection before or after the n-th command of a completion
    failing_os       a module `os` whose calls fail now and then
    failing_text     its text thread fails
    late_intake      begins its first task when another worker has begun it
    late_publisher   writes when its message has come again
    late_completion  completes its first task when another worker has completed it
    uncollected      runs without garbage collection, and counts the jobs in memory
    overfilled       requests with too many entries, at each door
    endless_load     its model never comes
    slow_hub         its model comes from a hub that never sends the last bytes

Parts of a worker, turned by hand:

    jobs             jobs, outcomes and messages
    publishing       attempts of one task: begun and published

An engine without a real model:

    toy_engine       an engine over the toy model, and the oracle of its answers
    toy_runtime      the toy model: exact arithmetic, on the CPU device's streams
    toy_text         its tokenizer and a constraint
    split_keys       FlashInfer's attention over keys that are split among blocks, in numpy
    stepped          a scheduler that is stepped by hand, without threads or torch
    sequences        sequences of the state machine
    interrupted      a fault at any call that the engine makes
    swept            the same at random, in all that an engine does for its sequences
    toy_decoder      a decoder of values beside tokens, served by the real runtime
    values           a decoder of values around any other

Models and devices:

    class_defaults   writes the table of what config.json may leave out
    families         every family that can be served, small and random
    gguf             GGUF files, written by loops
    gguf_models      models of transformers as GGUF files
    mutated          files of strangers: one value of a valid one is changed
    moondream        a narrow Moondream 2
    other_decoders   decoders that differ from the known one in one thing each
    text_models      small random models of texts, with the files of sentence-transformers
    tokenizers       small tokenizers of each kind
    reciting         a small gpt-oss that says one given thing
    tooled           petiole-tiny with a chat template for tools and reasoning
    tools            random tools, with schemas of many shapes, and calls of them
    written          how each family writes a message with reasoning and calls of tools
    chat_templates   a small chat template for each format of calls
    pictures         pictures of shapes, as files
    seeing           small models that see, and what transformers says of them
    plans            plans of small models, and weights to draw for them
    dtypes           models in another type
    quantised        quantised layers of each format, packed by loops
    coded            coded weights of each form, with random codes
    tensor_cores     products in Triton's interpreter whose sums have one order
    processors       the CPU kernels for processors with fewer instructions
    agreement        whether bfloat16 agrees with a model as far as it can
    fake_flashinfer  FlashInfer's interface in plain torch
    late_device      a device that computes as late as it may
"""
