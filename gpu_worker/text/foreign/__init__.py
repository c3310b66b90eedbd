"""What came with a checkpoint, run or tried in a process of its own. Called by `chat` and `tokenizer_files`.

sandbox             renders chat templates
_template_process   renders them there; a job of `children`
_tokenizer_process  tries it there; a job of `children`
"""
