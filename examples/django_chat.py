"""A chat in Django, in one file: `python examples/django_chat.py runserver`, then http://127.0.0.1:8000/.

The page submits a question, and follows the answer as server-sent events. Reload it in mid-sentence, cut the
connection, or kill the worker while another one runs: each token comes once.
"""

import sys

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.template import engines
from django.urls import path
from django.views.decorators.http import require_GET, require_POST

import petiole

settings.configure(
    DEBUG=True,
    SECRET_KEY="an example has no secret",
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["localhost", "127.0.0.1", "testserver"],
    MIDDLEWARE=["django.middleware.csrf.CsrfViewMiddleware"],
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
)
django.setup()

REFUSED = {petiole.InvalidRequest: 400, petiole.UnknownTask: 404, petiole.Unavailable: 503}

PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Chat</title>
<form>{% csrf_token %}<input name="question" value="Count from 1 to 40." size="40"><button>Ask</button></form>
<p id="answer" aria-live="polite"></p>
<script>
  const answer = document.getElementById("answer");
  const follow = (id) => {
    answer.textContent = "";
    const source = new EventSource(`/answers/${id}`);  // it comes back by itself, with the id of its last event
    source.onmessage = (event) => { answer.textContent += JSON.parse(event.data).text; };
    source.addEventListener("failed", (event) => { answer.textContent = JSON.parse(event.data).error; });
    source.addEventListener("end", () => source.close());
  };
  document.forms[0].onsubmit = async (event) => {
    event.preventDefault();
    const said = await fetch("/ask", {method: "POST", body: new FormData(event.target)});
    if (!said.ok) { answer.textContent = await said.text(); return; }
    location.hash = (await said.json()).id;  // a reload follows the same answer from its beginning
    follow(location.hash.slice(1));
  };
  if (location.hash) follow(location.hash.slice(1));
</script>
"""


@require_GET
def page(request):
    return HttpResponse(engines["django"].from_string(PAGE).render({}, request))


@require_POST
def ask(request):
    messages = [{"role": "user", "content": request.POST.get("question", "")}]
    try:
        result = petiole.chat.delay(messages=messages, max_tokens=1000, temperature=0, registered=True)
    except tuple(REFUSED) as error:
        return HttpResponse(str(error), status=REFUSED[type(error)])
    return JsonResponse({"id": result.id})  # an application notes whose it is, and checks that below


@require_GET
def answer(request, task_id):
    try:
        events = petiole.sse(task_id, request.headers.get("Last-Event-ID"))
    except tuple(REFUSED) as error:
        return HttpResponse(str(error), status=REFUSED[type(error)])
    return StreamingHttpResponse(events, headers=petiole.SSE_HEADERS)


urlpatterns = [path("", page), path("ask", ask), path("answers/<task_id>", answer)]

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
