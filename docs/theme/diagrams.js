// Draws the diagrams of a page that has some, with the copy of mermaid beside this file. Without it they stay text.
const diagrams = document.querySelectorAll("pre.diagram");
if (diagrams.length) {
  const script = document.createElement("script");
  script.src = document.currentScript.src.replace("diagrams.js", "mermaid.min.js");
  script.onload = () => {
    const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
    mermaid.initialize({startOnLoad: false, theme: dark ? "dark" : "neutral"});
    for (const pre of diagrams) pre.textContent = pre.textContent.trim();
    mermaid.run({nodes: diagrams});
  };
  document.head.append(script);
}
