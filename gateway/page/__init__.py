"""The page at `/`: a chat and the fleet, for a person who looks. Static files, without a build step.

fleet       what is shown of the fleet. Pure
index.html  the page; page.css: its colours and shapes; leaf.svg
page.js     the shell: views, colours
chat.js     the conversation; kept.js: conversations in this browser; shared.js: those
            of the tenant; following.js: an answer is read on, whatever
            dies; words.js: text as elements; pictures.js: pictures and texts that go with a message
fleet.js    the fleet; keys.js: tenants and their keys; shapes.js: what both draw alike
http.js     requests, the key, streams of events

The page uses the gateway's interface as any client does: what it can, a client can. No script and no style stands
in the HTML, and no text of a model is ever read as HTML.
"""
